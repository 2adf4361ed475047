"""A token bucket: so many a second on average, and a few more at once."""

import time
from collections.abc import Callable
from typing import Final


class TokenBucket:
    """Counts what may be done now.

    Args:
        per_second: How often on average.
        burst: How often at once, after a pause.
        clock: Gives monotonic seconds.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second: Final = per_second
        self._burst: Final = burst
        self._clock = clock
        self._tokens = float(burst)
        self._at = clock()

    def wait_s(self) -> float:
        """Seconds until one may be taken; 0 if it may now."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        return max(0.0, (1 - self._tokens) / self._per_second)

    def take(self) -> None:
        """Take one, when :meth:`wait_s` says that it may be taken."""
        self._tokens -= 1
