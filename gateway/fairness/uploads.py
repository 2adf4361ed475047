"""Memory for uploads, counted as bytes arrive; when it is short, the slowest upload is dropped."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from omnirelay.errors import BusyError, RequestError, SlowUploadError
from omnirelay.protocol import PIECE_BYTES

IDLE_S: Final = 10.0
"""Longest pause of an upload."""
MIN_BYTES_PER_S: Final = 2**17
"""Minimum average rate, from :data:`IDLE_S` after the start."""
RECENT_S: Final = 2.0
"""Window of :meth:`IncomingUpload.speed`."""
RETRY_MS: Final = 1000


class IncomingUpload:
    """A request or WebSocket message that is being received.

    Dropped when it pauses for :data:`IDLE_S`, is slower than :data:`MIN_BYTES_PER_S`, or memory is short.

    Args:
        give_up: Called once with the reason if it is dropped; the caller must then discard what it received.
        uncounted: Bytes up to which it is small, and not counted.

    Attributes:
        size: Bytes received.
        counted: Bytes counted in the room; 0 for small uploads.
        body: The bytes, if they are kept here, until :meth:`finish`.
        error: Why it was dropped.
        complete: It can no longer be dropped.
    """

    def __init__(
        self, room: "UploadRoom", client: str, give_up: Callable[[RequestError], None], uncounted: int
    ) -> None:
        self._room: Final = room
        self._uncounted = uncounted
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._began = self._last = self._loop.time()
        self._window = self._began
        self._before = self._since = 0
        self.client: Final = client
        self.size = 0
        self.counted = 0
        self.body = bytearray()
        self.error: RequestError | None = None
        self.complete = False
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._due, self._check)

    def add(self, piece: bytes) -> None:
        """Keep received bytes, unless the upload was dropped."""
        self.grow(len(piece))
        if self.error is None:
            self.body += piece

    def grow(self, size: int) -> None:
        """Count received bytes that are kept elsewhere, unless the upload was dropped."""
        if self.error is not None:
            return
        self.size += size
        self._last = self._loop.time()
        self._roll(self._last)
        self._since += size
        if self.size > self._uncounted:
            self._room.count(self, self.size - self.counted)

    def finish(self) -> bytearray:
        """The complete body, which stays counted until :meth:`close`; raises why the upload was dropped."""
        self.stop_timing()
        if self.error is not None:
            raise self.error
        self.complete = True
        body, self.body = self.body, bytearray()
        return body

    def close(self) -> None:
        """Stop counting; may be called again."""
        self.stop_timing()
        self._room.forget(self)

    def give_up(self, error: RequestError) -> None:
        """Drop the upload."""
        self.close()
        self.body = bytearray()
        self.error = error
        self._give_up(error)

    def speed(self) -> float:
        """Bytes per second over the last :data:`RECENT_S`."""
        now = self._loop.time()
        self._roll(now)
        age = now - self._began
        if age < RECENT_S:
            return self.size / max(age, 1e-3)
        return (self._before * (1 - (now - self._window) / RECENT_S) + self._since) / RECENT_S

    @property
    def _due(self) -> float:
        """When more must have arrived."""
        return IDLE_S + min(self._last, self._began + self.size / MIN_BYTES_PER_S)

    def _roll(self, now: float) -> None:
        passed = int((now - self._window) / RECENT_S)
        if passed:
            self._before, self._since = self._since if passed == 1 else 0, 0
            self._window += passed * RECENT_S

    def _check(self) -> None:
        now = self._loop.time()
        if now < self._due:
            self._timer = self._loop.call_at(self._due, self._check)
            return
        self.give_up(
            SlowUploadError(
                f"{self.size} bytes came in {now - self._began:.0f} s: send at least {MIN_BYTES_PER_S} "
                f"a second, and something every {IDLE_S:g} s"
            )
        )

    def stop_timing(self) -> None:
        """All has come: only where memory is short is it dropped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class UploadRoom:
    """Memory shared by all uploads, in bytes that have arrived; a single upload may be larger than all.

    When it is full, the slowest upload below :data:`MIN_BYTES_PER_S` is dropped, else the slowest of the
    client that holds most.
    """

    def __init__(self, total: int) -> None:
        self.total: Final = total
        self.used = 0
        self._uploads: set[IncomingUpload] = set()

    def open(
        self, client: str, give_up: Callable[[RequestError], None], uncounted: int = PIECE_BYTES
    ) -> IncomingUpload:
        """Start an upload, which must be closed."""
        upload = IncomingUpload(self, client, give_up, uncounted)
        self._uploads.add(upload)
        return upload

    @asynccontextmanager
    async def reading(self, client: str) -> AsyncIterator[IncomingUpload]:
        """Receive an upload in a block, which SlowUploadError or BusyError ends if the upload is dropped."""
        upload: IncomingUpload | None = None
        try:
            async with asyncio.timeout(None) as timer:
                upload = self.open(client, lambda _: timer.reschedule(0))
                try:
                    yield upload
                finally:
                    upload.close()
        except TimeoutError:
            if upload is None or upload.error is None:
                raise
            raise upload.error from None

    def count(self, upload: IncomingUpload, size: int) -> None:
        """Count more bytes of an upload; drops others, or it, to make room."""
        while size > self.total - self.used and self.used > upload.counted:
            victim = self._slowest(upload)
            victim.give_up(
                BusyError(
                    f"{self.used} bytes of uploads are held, no room for {size} more, and this one is the "
                    f"slowest (gateway.limits.held_bytes is {self.total}): try again later",
                    RETRY_MS,
                )
            )
            if victim is upload:
                return
        upload.counted += size
        self.used += size

    def forget(self, upload: IncomingUpload) -> None:
        """Stop counting an upload; may be called again."""
        self._uploads.discard(upload)
        self.used -= upload.counted
        upload.counted = 0

    def _slowest(self, growing: IncomingUpload) -> IncomingUpload:
        speeds = {each: each.speed() for each in self._uploads if each.counted and not each.complete}
        slow = [each for each, speed in speeds.items() if speed < MIN_BYTES_PER_S]
        if not slow:
            speeds.setdefault(growing, growing.speed())
            own = Counter[str]()
            for each in self._uploads:
                own[each.client] += each.counted
            most = max(own[each.client] for each in speeds)
            slow = [each for each in speeds if own[each.client] == most]
        return min(slow, key=speeds.__getitem__)
