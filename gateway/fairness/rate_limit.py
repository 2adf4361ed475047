"""A token bucket."""

import time
from collections.abc import Callable
from typing import Final


class TokenBucket:
    """Limits a rate: ``per_second`` on average, at most ``burst`` at once."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second: Final = per_second
        self._burst: Final = burst
        self._clock = clock
        self._tokens = float(burst)
        self._at = clock()

    def wait_s(self, tokens: float = 1) -> float:
        """Seconds until so many tokens are available."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        return max(0.0, (tokens - self._tokens) / self._per_second)

    def take(self, tokens: float = 1) -> None:
        """Take tokens, which are available or are waited for."""
        self._tokens -= tokens
