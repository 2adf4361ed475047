"""The events of one request on their way to the client, bounded in bytes."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.access.account import ClientAccount
from omnirelay.events import AcceptedEvent, AudioEvent, CodecEvent, Event, FinalEvent, TextEvent

EVENT_OVERHEAD: Final = 64
BYTES_PER_ID: Final = 8
BYTES_PER_LOGPROB: Final = 16


def weight(event: Event) -> int:
    """Approximate memory of a waiting event."""
    if isinstance(event, AudioEvent):
        return EVENT_OVERHEAD + len(event.pcm)
    if isinstance(event, CodecEvent):
        return EVENT_OVERHEAD + BYTES_PER_ID * len(event.token_ids)
    if isinstance(event, TextEvent):
        logprobs = sum(BYTES_PER_LOGPROB * (1 + len(each.top)) for each in event.logprobs)
        return EVENT_OVERHEAD + len(event.text) + BYTES_PER_ID * len(event.token_ids) + logprobs
    return EVENT_OVERHEAD


class ResponseStream:
    """Async iterator over a request's events; the last one is a done or error event.

    Always close it: that frees the client's place, and cancels the request if it has not ended.
    """

    def __init__(
        self, request_id: str, account: ClientAccount, cancel: Callable[[str], None], seed: int | None = None
    ) -> None:
        self.request_id: Final = request_id
        self._account = account
        self._cancel = cancel
        self._events: deque[Event] = deque([AcceptedEvent(request_id=request_id, seed=seed)])
        self._grown = asyncio.Event()
        self._finished = False
        self._closed = False

    def belongs_to(self, account: ClientAccount) -> bool:
        """The request's client uses this account, by its key; without keys, whoever knows its id may."""
        own, other = self._account.client, account.client
        return own.name == other.name or not (own.keyed or other.keyed)

    def push(self, event: Event) -> None:
        """Append an event; SlowClientError if too many bytes are unread."""
        self._account.charge(weight(event))
        self._events.append(event)
        self._grown.set()

    def finish(self, event: FinalEvent, drop_waiting: bool = False) -> None:
        """Append the last event; never rejected."""
        self._finished = True
        if drop_waiting:
            self._drop_waiting()
        self._events.append(event)
        self._grown.set()

    def cancel(self) -> None:
        """Cancel the request; an error event follows."""
        if not self._finished:
            self._cancel(self.request_id)

    def close(self) -> None:
        """Drop waiting events and take no more."""
        if self._closed:
            return
        self._closed = True
        self.cancel()
        self._drop_waiting()
        self._account.end()

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> Event:
        await self.peek()
        event = self._events.popleft()
        self._release(event)
        return event

    async def peek(self) -> Event:
        """Wait for the next event, which iteration still returns; StopAsyncIteration if there is none."""
        while not self._events:
            if self._finished or self._closed:
                raise StopAsyncIteration
            self._grown.clear()
            await self._grown.wait()
        return self._events[0]

    def _drop_waiting(self) -> None:
        while self._events:
            self._release(self._events.popleft())

    def _release(self, event: Event) -> None:
        if not isinstance(event, AcceptedEvent | FinalEvent):
            self._account.release(weight(event))
