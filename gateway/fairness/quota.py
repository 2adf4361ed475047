"""Room that many clients share, and of which no single one may take all."""

from collections import Counter
from typing import Final

TIMES_FREE: Final = 4
"""Alone, a client may hold four fifths."""


class Quota:
    """Places or bytes, and which client holds how much of them.

    The more clients hold something, the smaller is the part that one may have, and who holds nothing gets the
    next that is free.

    Args:
        total: How much there is.
        times_free: A client that holds so many times what is free gets no more.
    """

    def __init__(self, total: int, times_free: int = TIMES_FREE) -> None:
        self.total: Final = total
        self._times_free = times_free
        self.used = 0
        self._own: Counter[str] = Counter()

    @property
    def free(self) -> int:
        """What nobody holds."""
        return self.total - self.used

    def own(self, client: str) -> int:
        """What a client holds."""
        return self._own[client]

    def has_for(self, client: str, size: int = 1, besides: int = 0) -> bool:
        """Whether a client may have so much more.

        Args:
            client: Which.
            size: How much more.
            besides: Of what it holds, not counted against it: what it is for needs all or nothing.
        """
        own = self._own[client] - besides
        return size <= self.free and (not own or own < self._times_free * self.free)

    def take(self, client: str, size: int = 1) -> None:
        """Note that a client has more; whether it may is :meth:`has_for`'s to say."""
        self.used += size
        self._own[client] += size

    def give(self, client: str, size: int = 1) -> None:
        """Note that a client has less."""
        self.used -= size
        self._own[client] -= size
        if not self._own[client]:
            del self._own[client]
