"""The events that a session sends: numbered, written in order, and kept for a client that reconnects."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from gateway.http.connection import ClientGoneError


class Outbox:
    """Sends over one connection at a time; while there is none, events are only kept.

    Args:
        limit: Bytes of written events that are kept; 0: none, and the events show no numbers.

    Attributes:
        last: The number of the newest event.
        connections: The number of the newest connection; the first is 0.
    """

    def __init__(self, limit: int) -> None:
        self.last = 0
        self.limit: Final = limit
        self._kept = deque[bytes]()
        self._size = 0
        self._written = 0
        self._connected = True
        self.connections = 0
        self._closed = False
        self._grown = asyncio.Event()
        self._moved = asyncio.Event()

    async def send(self, kind: str, fields: dict[str, Any]) -> None:
        """Send an event; wait until the connection, if there is one, has taken it.

        A cancelled caller's event is sent nevertheless, because it has its number.

        Raises:
            ClientGoneError: The session has ended.
        """
        if self._closed:
            raise ClientGoneError
        self.last = number = self.last + 1
        event: dict[str, Any] = {"type": kind, "event_id": f"event_{number:x}"}
        if self.limit:
            event["sequence_number"] = number
        data = msgspec.json.encode(event | fields)
        self._kept.append(data)
        self._size += len(data)
        self._forget()
        self._grown.set()
        while self._connected and self._written < number:
            await self._moved.wait()
        if self._closed:
            raise ClientGoneError

    def connect(self, after: int) -> bool:
        """Begin with the event after a number; false if that is not kept any more, or not sent yet."""
        if not self.last - len(self._kept) <= after <= self.last:
            return False
        self._connected, self._written = True, after
        self.connections += 1
        return True

    async def write(self, write: Callable[[str], Awaitable[None]], connection: int = 0) -> None:
        """Write events as they come, until cancelled, ``write`` fails, or a newer connection is there."""
        while connection == self.connections:
            if self._written == self.last:
                self._grown.clear()
                await self._grown.wait()
                continue
            await write(self._kept[self._written - self.last].decode())
            if connection == self.connections:
                self._written += 1
                self._forget()
                self._move()

    def disconnect(self) -> None:
        """Have nobody wait for a connection."""
        self._connected = False
        self._forget()
        self._move()

    def close(self) -> None:
        """The session has ended: who sends learns that the client is gone."""
        self._closed = True
        self.disconnect()

    def _move(self) -> None:
        self._moved.set()
        self._moved.clear()

    def _forget(self) -> None:
        """Drop the oldest events beyond the limit; none that the connection waits for."""
        while self._size > self.limit and self._kept:
            if self._connected and self.last - len(self._kept) >= self._written:
                return
            self._size -= len(self._kept.popleft())
