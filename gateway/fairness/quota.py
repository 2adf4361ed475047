"""A quota that no single client can exhaust."""

from collections import Counter
from typing import Final

TIMES_FREE: Final = 4
"""Alone, a client gets four fifths."""


class Quota:
    """Places or bytes; a client gets no more while it holds ``times_free`` times the units that are free."""

    def __init__(self, total: int, times_free: int = TIMES_FREE) -> None:
        self.total = total
        self._times_free = times_free
        self.used = 0
        self._own: Counter[str] = Counter()

    @property
    def free(self) -> int:
        """Units that nobody holds; none while the total is less than what is held."""
        return max(self.total - self.used, 0)

    def own(self, client: str) -> int:
        """Units that a client holds."""
        return self._own[client]

    def has_for(self, client: str, size: int = 1, besides: int = 0) -> bool:
        """Whether a client may take more; ``besides`` units that it holds are not counted against it."""
        own = self._own[client] - besides
        return size <= self.free and (not own or own < self._times_free * self.free)

    def take(self, client: str, size: int = 1) -> None:
        """Take units, without asking :meth:`has_for`."""
        self.used += size
        self._own[client] += size

    def give(self, client: str, size: int = 1) -> None:
        """Return units."""
        self.used -= size
        self._own[client] -= size
        if not self._own[client]:
            del self._own[client]
