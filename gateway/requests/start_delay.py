"""How long a listener should wait before it plays, so that the speech does not stop later.

Speech that is made more slowly than it is heard has to be begun later.  What is still to come is not known
when the first audio is sent, so it is estimated: from this answer's rates so far, and from earlier answers.

All rates are real-time factors: seconds of work for a second of speech.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

from omnirelay.status import CodecLimits
from shared.messages import SAMPLE_RATE, SpeechSettings

RESERVE: Final = 1.1
"""More than the estimate."""
IGNORED_S: Final = 0.05
"""Less than that is no delay: players have a buffer of their own."""
WINDOW_S: Final = 2.0
"""Seconds of speech over which a rate is measured."""
ANSWERS: Final = 64
"""So many answers tell how long answers are."""
RECENT: Final = 8
"""So many tell how fast and how even they are; one disturbed answer among them has no consequence."""
LONGER: Final = 1.25
"""A reply longer than all that were seen is expected to be so many times as long as it is so far."""
USUAL_TOKENS: Final = 64
"""Length of a reply, until one was seen."""
USUAL_SECONDS: Final = 0.25
"""Speech of a text token, until an answer was seen."""


class Outlook(NamedTuple):
    """What follows the first audio.

    Attributes:
        rest_s: Seconds of speech for which no codec tokens are there.
        unwritten_s: The first seconds of it, which wait for their text.
        writing: Real-time factor while text is written.
        speaking: That of talker and token2wav.
    """

    rest_s: float
    unwritten_s: float
    writing: float
    speaking: float

    @property
    def least_delay(self) -> float:
        """The shortest delay without a gap: the most by which a piece comes later than its turn."""
        unwritten = min(self.rest_s, self.unwritten_s)
        late = unwritten * (max(self.writing, self.speaking) - 1)
        return max(0.0, late, late + (self.rest_s - unwritten) * (self.speaking - 1))


class SpeechHistory:
    """What earlier answers tell of the next one."""

    def __init__(self) -> None:
        self._answers: deque[tuple[int, float]] = deque(maxlen=ANSWERS)
        self._speaking: deque[float] = deque(maxlen=RECENT)
        self._uneven: deque[float] = deque(maxlen=RECENT)

    @property
    def speaking(self) -> float | None:
        """Real-time factor of talker and token2wav; none until it was measured."""
        return median(self._speaking) if self._speaking else None

    @property
    def uneven_s(self) -> float:
        """How much later pieces come than the rates say: each comes whole."""
        return _high(self._uneven, 0.0)

    def expect(self, tokens: int, written: bool) -> tuple[float, float]:
        """Estimate an answer's text tokens and seconds from its tokens so far; ``written``: they are all.

        High, for too much is heard once.
        """
        expected = float(tokens)
        if not written:
            longer = [seen for seen, _ in self._answers if seen > tokens]
            expected = _high(longer, max(LONGER * tokens, 0 if self._answers else USUAL_TOKENS))
        return expected, expected * _high((seconds / seen for seen, seconds in self._answers), USUAL_SECONDS)

    def spoke(self, factor: float) -> None:
        """An answer was spoken at this real-time factor."""
        self._speaking.append(factor)

    def ended(self, tokens: int, seconds: float, uneven_s: float) -> None:
        """An answer is complete."""
        if tokens and seconds:
            self._answers.append((tokens, seconds))
            self._uneven.append(uneven_s)


@dataclass(eq=False)
class AnswerPace:
    """The rates of one answer, as the gateway sees it arrive.

    Attributes:
        _rate: Codec frames a second, not always whole; while text is written, one for each text token.
        _groups: Codec ids of a frame.
        _most_s: Longest delay; 0 switches it off.
        _window: Where the measurement of speaking began: time, seconds so far, how late pieces were.
        _settled: It began with a piece that waited for no text.
    """

    _history: SpeechHistory
    _rate: float
    _groups: int
    _most_s: float
    _clock: Callable[[], float] = time.monotonic
    _texts: list[float] = field(default_factory=list)
    _tokens: int = 0
    _written_at: float | None = None
    _codes: list[tuple[float, int]] = field(default_factory=list)
    _audio_s: float = 0.0
    _first_s: float = 0.0
    _first_at: float = 0.0
    _late_s: float = 0.0
    _window: tuple[float, float, float] | None = None
    _settled: bool = False
    _speaking: float | None = None
    _expected: float = 0.0

    def text(self, tokens: int, last: bool) -> None:
        """Text tokens arrived."""
        now = self._clock()
        if tokens:
            # First and newest.
            self._texts = [*self._texts[:1], now]
            self._tokens += tokens
        if last:
            self._written_at = now

    def codes(self, ids: int) -> None:
        """Codec ids arrived."""
        if not self._audio_s:
            before = self._codes[-1][1] if self._codes else 0
            self._codes.append((self._clock(), before + ids // self._groups))

    def audio(self, seconds: float, last: bool) -> float | None:
        """Audio arrived; with the first piece, return the delay in seconds."""
        now = self._clock()
        delay = None
        if not self._audio_s:
            self._first_at, self._first_s = now, seconds
            delay = 0.0 if last else self._delay()
        else:
            self._late_s = max(self._late_s, now - self._first_at - self._audio_s)
        self._audio_s += seconds
        self._measure(now, last)
        return delay

    def ended(self) -> None:
        """The answer is complete."""
        if not self._audio_s:
            return
        speaking = self._expected if self._speaking is None else self._speaking
        foreseen = self._outlook(self._tokens, self._audio_s, speaking).least_delay
        self._history.ended(self._tokens, self._audio_s, max(0.0, self._late_s - foreseen))

    def _delay(self) -> float:
        tokens, seconds = self._history.expect(self._tokens, self._written_at is not None)
        self._expected = self._expected_speaking()
        outlook = self._outlook(tokens, seconds, self._expected)
        wanted = RESERVE * outlook.least_delay + (self._history.uneven_s if outlook.rest_s else 0.0)
        return min(self._most_s, wanted) if wanted > IGNORED_S else 0.0

    def _outlook(self, tokens: float, seconds: float, speaking: float) -> Outlook:
        """What follows, if the answer has so many text tokens and seconds."""
        open_text = self._written_at is None or self._written_at > self._first_at
        unwritten = max(0.0, tokens / self._rate - self._needed_s) if open_text else 0.0
        return Outlook(max(0.0, seconds - self._needed_s), unwritten, self._writing, speaking)

    @property
    def _needed_s(self) -> float:
        """Codec tokens that the first piece needed, in seconds: it and as many again of look-ahead."""
        return 2 * self._first_s

    @property
    def _writing(self) -> float:
        """Real-time factor of the text."""
        if len(self._texts) < 2 or self._tokens < 2:
            return 0.0
        return (self._texts[-1] - self._texts[0]) * self._rate / (self._tokens - 1)

    def _expected_speaking(self) -> float:
        """Estimate the real-time factor of what is not limited by the text."""
        known, seen = self._history.speaking, self._speaking_so_far()
        if known is not None:
            # The talker alone may be faster than both; if it is slower, the load has grown.
            return known if seen is None else max(known, (known + seen) / 2)
        # What the first piece took is no measure of synthesis: it is short, and perhaps the first of all.
        return seen or 0.0

    def _speaking_so_far(self) -> float | None:
        """Real-time factor of the talker's first codec tokens; none if they waited for text."""
        if len(self._codes) < 2:
            return None
        (began, first), (ended, frames) = self._codes[0], self._codes[-1]
        if frames == first:
            return None
        factor = (ended - began) * self._rate / (frames - first)
        waited = (self._written_at is None or self._written_at > began) and self._writing > 0.8 * factor
        return None if waited else factor

    def _measure(self, now: float, last: bool) -> None:
        """Measure speaking once the text is there."""
        if self._written_at is None or self._speaking is not None:
            return
        if self._window is None or not self._settled:
            # The first piece after the text has waited for some of it.
            self._settled = self._window is not None
            self._window = (now, self._audio_s, self._late_s)
            return
        began, before, late = self._window
        made = self._audio_s - before
        if made >= WINDOW_S or (last and made >= WINDOW_S / 2):
            factor = (now - began) / made
            # A stream that was in time may have waited for others: how fast it can be is unknown.
            self._speaking = factor if self._late_s > late else min(1.0, factor)
            self._history.spoke(self._speaking)


def pace_of(
    history: SpeechHistory, speech: SpeechSettings | None, codec: CodecLimits, most_s: float
) -> AnswerPace | None:
    """The rates of an answer that begins; none without speech, or if that comes in one piece."""
    if speech is None or not speech.streaming:
        return None
    return AnswerPace(history, SAMPLE_RATE / codec.frame_samples, codec.groups, most_s)


def _high(values: Iterable[float], otherwise: float) -> float:
    """The value that four of five do not exceed."""
    ordered = sorted(values)
    return ordered[(4 * len(ordered) - 1) // 5] if ordered else otherwise
