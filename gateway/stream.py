"""The events of one request on their way to the client, bounded in bytes."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.clients import RETRY_OWN_REQUESTS_MS, Client
from gateway.events import AcceptedEvent, AudioEvent, DoneEvent, ErrorEvent, Event, FinalEvent, TextEvent
from gateway.protocol import GenerateRequest
from shared.errors import BusyError, SlowClientError

EVENT_OVERHEAD: Final = 64
BYTES_PER_ID: Final = 8
UNREAD_OF_ONE: Final = 2**20
"""What a client that reads leaves unread at most."""


def weight(event: Event) -> int:
    """Bytes that an event takes while it waits, roughly."""
    if isinstance(event, AudioEvent):
        return EVENT_OVERHEAD + len(event.pcm)
    if isinstance(event, TextEvent):
        return EVENT_OVERHEAD + len(event.text) + BYTES_PER_ID * len(event.token_ids)
    return EVENT_OVERHEAD


class Unread:
    """What all clients together have not read.

    Args:
        limit: So many bytes may wait; then a client that has left :data:`UNREAD_OF_ONE` unread gets no more.

    Attributes:
        total: Bytes of answers that wait.
        requests: Those whose end their clients have not taken.
    """

    def __init__(self, limit: int) -> None:
        self.limit: Final = limit
        self.total = 0
        self.requests = 0


class ClientAccount:
    """What one connection may have open at once, and its client over all connections.

    Args:
        name: For the log.
        max_requests: Requests whose end the connection has not taken.
        max_backlog_bytes: Bytes of answer that the connection has not taken.
        client: Whose connection it is; none makes it a client of its own.
        unread: Where what waits for all is counted.
    """

    def __init__(
        self,
        name: str,
        max_requests: int,
        max_backlog_bytes: int,
        client: Client | None = None,
        unread: Unread | None = None,
    ) -> None:
        self.name: Final = name
        self.max_requests: Final = max_requests
        self.client = client or Client(name)
        self._max_backlog_bytes = max_backlog_bytes
        self._unread = unread or Unread(max_backlog_bytes)
        self.open_requests = 0
        self.backlog_bytes = 0

    @property
    def share(self) -> str:
        """What its client's share of the gateway goes by."""
        return self.client.name

    def allowed(self, request: GenerateRequest) -> GenerateRequest:
        """Give a request no more urgent than the client may make it."""
        best = self.client.limits.best_priority
        return request if request.priority >= best else msgspec.structs.replace(request, priority=best)

    def open(self) -> None:
        """Count one more request.

        Raises:
            BusyError: The connection, or the client, has as many as it may.
            UnauthenticatedError: The client is not known.
        """
        if self.open_requests >= self.max_requests:
            raise self.busy()
        self.client.open()
        self.open_requests += 1
        self._unread.requests += 1

    def end(self) -> None:
        """Count one less."""
        self.open_requests -= 1
        self._unread.requests -= 1
        self.client.close()

    def busy(self) -> BusyError:
        """Give the answer to one request too many."""
        return BusyError(
            f"this client has {self.max_requests} requests open, no more are taken", RETRY_OWN_REQUESTS_MS
        )

    def charge(self, size: int) -> None:
        """Count bytes that wait for the connection.

        Raises:
            SlowClientError: They are more than may wait.
        """
        if self.backlog_bytes + size > self._max_backlog_bytes:
            raise self._too_slow(self._max_backlog_bytes)
        unread = self._unread
        if unread.total + size > unread.limit and self.backlog_bytes > UNREAD_OF_ONE:
            raise self._too_slow(UNREAD_OF_ONE)
        self.backlog_bytes += size
        unread.total += size

    def release(self, size: int) -> None:
        """Count bytes that the connection has taken, or never will."""
        self.backlog_bytes -= size
        self._unread.total -= size

    def _too_slow(self, most: int) -> SlowClientError:
        return SlowClientError(
            f"{self.backlog_bytes} bytes of answer wait to be read, no more than {most} are kept now"
        )


class ResponseStream:
    """An async iterator over the events of one request; the last one is a done or an error event.

    Close it in any case: it frees the client's place, and cancels the request if it has not ended.

    Args:
        request_id: The gateway's name of the request.
        account: Who pays for it.
        cancel: Called to cancel the request.
    """

    def __init__(self, request_id: str, account: ClientAccount, cancel: Callable[[str], None]) -> None:
        self.request_id: Final = request_id
        self._account = account
        self._cancel = cancel
        self._events: deque[Event] = deque([AcceptedEvent(request_id=request_id)])
        self._arrived = asyncio.Event()
        self._arrived.set()
        self._finished = False
        self._closed = False

    def push(self, event: Event) -> None:
        """Append an event.

        Raises:
            SlowClientError: Too much waits already; the event was not taken.
        """
        self._account.charge(weight(event))
        self._events.append(event)
        self._arrived.set()

    def finish(self, event: FinalEvent, drop_waiting: bool = False) -> None:
        """Append the last event; it is never refused."""
        self._finished = True
        if drop_waiting:
            while self._events:
                self._release(self._events.popleft())
        self._events.append(event)
        self._arrived.set()

    def cancel(self) -> None:
        """Ask for the request to be cancelled; the error event will follow."""
        if not self._finished:
            self._cancel(self.request_id)

    def close(self) -> None:
        """Take no more events."""
        if self._closed:
            return
        self._closed = True
        self.cancel()
        while self._events:
            self._release(self._events.popleft())
        self._account.end()

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._finished or self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._release(event)
        return event

    def _release(self, event: Event) -> None:
        if not isinstance(event, AcceptedEvent | DoneEvent | ErrorEvent):
            self._account.release(weight(event))
