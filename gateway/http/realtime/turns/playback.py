"""When a client plays the answers of a session, and what can be heard of them."""

import time
from collections import deque
from itertools import takewhile
from typing import Final, NamedTuple

import numpy as np

from gateway.http.realtime.items import BYTES_PER_S
from gateway.http.realtime.turns.silero import Floats
from shared.messages import SAMPLE_RATE

LATEST_S: Final = 1.0
"""An echo is heard at most so long after it could be played first, besides the advised start delay."""
EARLIEST_S: Final = 0.1
"""Clocks and networks may make it seem so much earlier."""
KEPT_S: Final = 1.5
"""So much before what may be heard is compared."""
TAIL_S: Final = LATEST_S + 0.5
"""Client and network may be so late, and a room reverberate."""
_MOST_DELAY_S: Final = 2.0
"""Of the advised start delay, in which an echo is looked for."""
_SAMPLE_BYTES: Final = 2


class SentAnswer(NamedTuple):
    """What may be heard of answers.

    Attributes:
        latest_s: An echo is heard at most so long after it could be played first.
        pieces: Time at which each is played if it is played as it comes, in samples, and the samples.
    """

    latest_s: float
    pieces: tuple[tuple[int, bytes], ...]

    def samples(self, first: int, count: int) -> Floats:
        """Return samples, from -1 to 1, from a time in samples; silence where there are none."""
        found = np.zeros(count, np.float32)
        for start, pcm in self.pieces:
            begin, end = max(start, first), min(start + len(pcm) // _SAMPLE_BYTES, first + count)
            if begin < end:
                found[begin - first : end - first] = np.frombuffer(pcm, "<i2")[begin - start : end - start]
        return found / np.float32(32768)


class Playback:
    """The speech of a session's answers: a client plays it as it comes, or after the advised delay.

    Attributes:
        end: Monotonic time at which all that was sent so far has been played, if it is played as it comes.
    """

    def __init__(self) -> None:
        self.end = 0.0
        self._delay_s = 0.0
        self._growing = False
        self._pieces = deque[tuple[int, bytes]]()

    @property
    def heard_until(self) -> float:
        """When a client that waits as advised has played all."""
        return self.end + self._delay_s

    def sent(self, pcm: bytes, delay_s: float = 0.0) -> None:
        """A piece was sent, int16, mono, 24 kHz; a first one with the advised delay."""
        now = time.monotonic()
        if not self.is_heard(now):
            self._delay_s = 0.0
        self._delay_s = max(self._delay_s, delay_s)
        self._growing = True
        begin = max(self.end, now)
        self.end = begin + len(pcm) / BYTES_PER_S
        self._pieces.append((round(begin * SAMPLE_RATE), pcm))
        self._forget(now)

    def finish(self) -> None:
        """No more comes of the answer."""
        self._growing = False

    def stop(self) -> None:
        """What was not played yet will not be."""
        self._growing = False
        self.end = min(self.end, time.monotonic())
        self._delay_s = 0.0
        # Or the next answer, which is played instead, would be looked for behind them.
        while self._pieces and self._pieces[-1][0] >= self.end * SAMPLE_RATE:
            self._pieces.pop()

    def is_heard(self, at: float) -> bool:
        """Whether an answer may be heard at a monotonic time: it grows, is played, or echoes."""
        return self.end > 0 and (self._growing or at < self.heard_until + TAIL_S)

    def answer(self, at: float) -> SentAnswer:
        """Return what may be heard at a monotonic time, or shortly before."""
        self._forget(at)
        last = (at + EARLIEST_S) * SAMPLE_RATE
        return SentAnswer(self._latest_s, tuple(takewhile(lambda piece: piece[0] < last, self._pieces)))

    @property
    def _latest_s(self) -> float:
        return LATEST_S + min(self._delay_s, _MOST_DELAY_S)

    def _forget(self, at: float) -> None:
        """Forget what cannot be heard any more."""
        first = (at - self._latest_s - KEPT_S) * SAMPLE_RATE
        while self._pieces and self._pieces[0][0] + len(self._pieces[0][1]) // _SAMPLE_BYTES < first:
            self._pieces.popleft()
