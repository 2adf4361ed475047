"""Earlier answers, for later requests of the same client that name them by an id."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

from gateway.fairness.quota import Quota

KEPT_S: Final = 600
ENTRY_BYTES: Final = 512
"""What an answer takes besides its content, generously."""
T = TypeVar("T")


class _Answer(NamedTuple, Generic[T]):
    client: str
    content: T
    size: int
    expires: float


class KeptAnswers(Generic[T]):
    """Keeps what is to be known of the newest answers, for :data:`KEPT_S`.

    Args:
        most_bytes: Of all clients together; an answer of more than an eighth is not kept.
    """

    def __init__(self, most_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: dict[str, _Answer[T]] = {}
        # The names of each client's answers, the oldest first.
        self._own: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._quota = Quota(most_bytes)

    def keep(self, client: str, name: str, content: T, size: int) -> int:
        """Keep an answer of ``size`` bytes; a client's oldest answers make room for its newest.

        Returns:
            Until when, in Unix time; now if others left no room for it.
        """
        now = self._clock()
        self._drop_expired(now)
        size += ENTRY_BYTES
        if size > min(self._quota.total // 8, self._quota.free + self._quota.own(client)):
            # Making room for it would cost the client all others.
            return int(now)
        while client in self._own and not self._quota.has_for(client, size):
            self._drop(next(iter(self._own[client])))
        if not self._quota.has_for(client, size):
            return int(now)
        self._quota.take(client, size)
        self._kept[name] = _Answer(client, content, size, now + KEPT_S)
        self._own[client][name] = None
        return int(now + KEPT_S)

    def get(self, client: str, name: str) -> T | None:
        """What is kept of this client's answer; none if nothing is."""
        answer = self._kept.get(name)
        kept = answer is not None and answer.client == client and self._clock() < answer.expires
        return answer.content if answer is not None and kept else None

    def _drop_expired(self, now: float) -> None:
        # All live equally long, so they expire in their order.
        while self._kept and (oldest := next(iter(self._kept.items())))[1].expires <= now:
            self._drop(oldest[0])

    def _drop(self, name: str) -> None:
        answer = self._kept.pop(name)
        self._quota.give(answer.client, answer.size)
        del self._own[answer.client][name]
        if not self._own[answer.client]:
            del self._own[answer.client]
