"""When to cut a stream, and how much of it, by how long synthesis takes.  Pure logic, no torch or clock."""

import math
from collections.abc import Sequence
from typing import Final

SMOOTHING: Final = 1 / 8
"""Weight of the newest chunk in the averages, once there were so many."""
DOUBT: Final = 0.25
"""Squared blocks: sizes that differ by less than about its root say nothing about the cost of size."""


class Pace:
    """Decides for all streams of the stage; times are in seconds of ``time.monotonic``.

    How long chunks take is estimated from those that were made, by a regression line through moving
    averages of sizes and times.  Where sizes did not differ enough, it errs on the safe side: larger chunks
    take more in proportion to their windows, smaller ones no less.  Until a chunk was made, one is expected
    to take as long as its window, ``look_ahead`` blocks beyond its target, sounds.  A chunk is cut
    ``margin_s`` before its latest time; 0 lets none wait.
    """

    def __init__(self, look_ahead: int, block_s: float, margin_s: float) -> None:
        self._look_ahead = look_ahead
        self._block_s = block_s
        self._margin_s = margin_s
        self._window = self._seconds = self._square = self._product = 0.0
        self._chunks = 0
        self._average(1.0, 1 + look_ahead, (1 + look_ahead) * block_s)

    def observe(self, blocks: int, seconds: float) -> None:
        """Note how long a chunk took."""
        self._chunks += 1
        # The first chunks count alike: a new process is slow at first.
        self._average(max(SMOOTHING, 1 / self._chunks), blocks + self._look_ahead, seconds)

    def expected(self, blocks: int) -> float:
        """Seconds that a chunk with such a target will take."""
        beyond = blocks + self._look_ahead - self._window
        variance = max(0.0, self._square - self._window**2)
        covariance = self._product - self._window * self._seconds
        proportional = self._seconds / self._window
        prior = proportional if beyond > 0 else 0.0
        slope = (covariance + DOUBT * prior) / (variance + DOUBT)
        return self._seconds + beyond * min(max(slope, 0.0), proportional)

    def is_urgent(self, start_by: float, now: float) -> bool:
        """Whether work that must begin by a time cannot wait any longer."""
        return not self._margin_s or now >= start_by - self._margin_s

    def choose(self, sizes: Sequence[int], may_wait: bool, due: float, now: float) -> tuple[int, float]:
        """Choose one of ``sizes`` (blocks, ascending) for the next target; or 0, and when to ask again.

        The largest is chosen that will be made in time.  If none will, there is a gap: it is ended by the
        smallest that plays for as long as it takes to make one.  If there is none, synthesis does not
        keep up, and the largest wastes least.  Waiting makes a target larger; it is over when the listener
        will have heard all that was made, at ``due``, less the margin.
        """
        start_by = due - self.expected(sizes[-1])
        if may_wait and not self.is_urgent(start_by, now):
            return 0, start_by - self._margin_s
        in_time = [blocks for blocks in sizes if now + self.expected(blocks) <= due]
        if in_time:
            return in_time[-1], math.inf
        lasting = (blocks for blocks in sizes if self.expected(blocks) <= blocks * self._block_s)
        return next(lasting, sizes[-1]), math.inf

    def _average(self, weight: float, window: float, seconds: float) -> None:
        self._window += weight * (window - self._window)
        self._seconds += weight * (seconds - self._seconds)
        self._square += weight * (window * window - self._square)
        self._product += weight * (window * seconds - self._product)
