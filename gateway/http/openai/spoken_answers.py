"""The texts of spoken answers, for later requests that name an answer by the id of its audio."""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.fairness.quota import Quota

KEPT_S: Final = 600
MOST_BYTES: Final = 4 * 2**20
"""Of all clients together."""
ENTRY_BYTES: Final = 512
"""What an answer takes besides its text, generously."""


class _Answer(NamedTuple):
    client: str
    text: str
    size: int
    expires: float


class SpokenAnswers:
    """Keeps the texts of the newest answers; the thinker's prompt has no audio of its own answers."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: dict[str, _Answer] = {}
        self._quota = Quota(MOST_BYTES)

    def keep(self, client: str, audio_id: str, text: str) -> int:
        """Keep an answer; a client's oldest answers make room for its newest.

        Returns:
            Until when, in Unix time; now if others left no room for it.
        """
        now = self._clock()
        self._drop_expired(now)
        size = len(text.encode()) + ENTRY_BYTES
        if size > MOST_BYTES // 8:
            # Making room for it would cost the client all others.
            return int(now)
        own = [each for each, answer in self._kept.items() if answer.client == client]
        for oldest in own:
            if self._quota.has_for(client, size):
                break
            self._drop(oldest)
        if not self._quota.has_for(client, size):
            return int(now)
        self._quota.take(client, size)
        self._kept[audio_id] = _Answer(client, text, size, now + KEPT_S)
        return int(now + KEPT_S)

    def text(self, client: str, audio_id: str) -> str | None:
        """The text of this client's answer; none if it is not kept."""
        answer = self._kept.get(audio_id)
        kept = answer is not None and answer.client == client and self._clock() < answer.expires
        return answer.text if answer is not None and kept else None

    def _drop_expired(self, now: float) -> None:
        # All live equally long, so they expire in their order.
        while self._kept and (oldest := next(iter(self._kept.items())))[1].expires <= now:
            self._drop(oldest[0])

    def _drop(self, audio_id: str) -> None:
        answer = self._kept.pop(audio_id)
        self._quota.give(answer.client, answer.size)
