"""The events of one request on their way to the client, bounded in bytes."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.events import AcceptedEvent, AudioEvent, DoneEvent, ErrorEvent, Event, FinalEvent, TextEvent
from shared.errors import BusyError, SlowClientError

EVENT_OVERHEAD: Final = 64
BYTES_PER_ID: Final = 8
RETRY_OWN_REQUESTS_MS: Final = 1000


def weight(event: Event) -> int:
    """Bytes that an event takes while it waits, roughly."""
    if isinstance(event, AudioEvent):
        return EVENT_OVERHEAD + len(event.pcm)
    if isinstance(event, TextEvent):
        return EVENT_OVERHEAD + len(event.text) + BYTES_PER_ID * len(event.token_ids)
    return EVENT_OVERHEAD


class ClientAccount:
    """What one client may have open at once: a TCP connection today, an API key later.

    Args:
        name: For the log.
        max_requests: Requests whose end the client has not taken.
        max_backlog_bytes: Bytes of answer that the client has not taken.
    """

    def __init__(self, name: str, max_requests: int, max_backlog_bytes: int) -> None:
        self.name: Final = name
        self.max_requests: Final = max_requests
        self._max_backlog_bytes = max_backlog_bytes
        self.open_requests = 0
        self.backlog_bytes = 0

    def open(self) -> None:
        """Count one more request.

        Raises:
            BusyError: The client has as many as it may.
        """
        if self.open_requests >= self.max_requests:
            raise self.busy()
        self.open_requests += 1

    def busy(self) -> BusyError:
        """Give the answer to one request too many."""
        return BusyError(
            f"this client has {self.max_requests} requests open, no more are taken", RETRY_OWN_REQUESTS_MS
        )

    def charge(self, size: int) -> None:
        """Count bytes that wait for the client.

        Raises:
            SlowClientError: They are more than may wait.
        """
        if self.backlog_bytes + size > self._max_backlog_bytes:
            raise SlowClientError(
                f"{self.backlog_bytes} bytes of answer wait to be read, "
                f"no more than {self._max_backlog_bytes} are kept"
            )
        self.backlog_bytes += size


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
        self._account.open_requests -= 1

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
            self._account.backlog_bytes -= weight(event)
