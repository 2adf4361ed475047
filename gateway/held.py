"""How many bytes of clients' files the gateway holds: for requests, and for uploads that are still coming."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from shared.errors import BusyError

UPLOAD_GRACE_S: Final = 10.0
MIN_UPLOAD_BYTES_PER_S: Final = 2**17
"""What comes more slowly is given up: it keeps memory from others."""


class HeldBytes:
    """The bytes of media that all living requests hold together, bounded.

    Args:
        limit: Most bytes.
        retry_after_ms: Says when a request that finds no room should come again.
    """

    def __init__(self, limit: int, retry_after_ms: Callable[[], int]) -> None:
        self.total = 0
        self._limit = limit
        self._retry_after_ms = retry_after_ms

    def take(self, size: int) -> None:
        """Count more bytes.

        Raises:
            BusyError: There is no room for them.
        """
        if self.total + size > self._limit:
            raise BusyError(
                f"{self.total} bytes of media are held, no room for {size} more "
                f"(gateway.limits.held_bytes is {self._limit}): try again later",
                self._retry_after_ms(),
            )
        self.total += size


class Hold:
    """What one request holds of them.

    Args:
        held: Where it is counted.
    """

    def __init__(self, held: HeldBytes) -> None:
        self._held: Final = held
        self.size = 0

    def grow(self, size: int) -> None:
        """Count more bytes for the request.

        Raises:
            BusyError: There is no room for them.
        """
        self._held.take(size)
        self.size += size

    def release(self) -> None:
        """Count none any more; may be called again."""
        self._held.total -= self.size
        self.size = 0


class UploadRoom:
    """Memory for large uploads while they are read: who finds none waits, in order, and is not read.

    Args:
        limit: Most bytes; an upload alone is always read.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._freed = asyncio.Event()
        self._line = asyncio.Lock()

    @staticmethod
    def limit_s(size: int) -> float:
        """Seconds that an upload of so many bytes may take."""
        return UPLOAD_GRACE_S + size / MIN_UPLOAD_BYTES_PER_S

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Wait for room, and keep it."""
        async with self._line:
            while self._used and self._used + size > self._limit:
                self._freed.clear()
                await self._freed.wait()
            self._used += size
        try:
            yield
        finally:
            self._used -= size
            self._freed.set()
