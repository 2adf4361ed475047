"""What the replies show, as figures with the bounds that a speaking checkpoint has to keep."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.quality.answers import Samples, SpokenReply
from labs.training.measure.recognizer import word_errors
from omnirelay.values import SAMPLE_RATE

_FRAME, _HOP = SAMPLE_RATE // 25, SAMPLE_RATE // 100
_LOWEST_HZ, _HIGHEST_HZ = 60, 350
_VOICED = 0.5
_LOUD = 0.3
_LENGTHS = (0.7, 1.4)
_LAST_SECONDS = 0.04
_QUIET = 0.15


def pitch(samples: Samples) -> float:
    """Return the median fundamental frequency of the voiced frames, in Hz; 0 where nothing is voiced."""
    if len(samples) < _FRAME:
        return 0.0
    frames = np.lib.stride_tricks.sliding_window_view(samples, _FRAME)[::_HOP].astype(np.float64)
    loudness = np.sqrt(np.mean(frames**2, axis=1))
    frames = frames[loudness > _LOUD * loudness.max()]
    if not len(frames):
        return 0.0
    frames = frames - frames.mean(axis=1, keepdims=True)
    power = np.abs(np.fft.rfft(frames, 2 * _FRAME)) ** 2
    correlation = np.fft.irfft(power)[:, :_FRAME]
    # The longer the lag, the fewer samples are compared.
    correlation /= correlation[:, :1] * (1 - np.arange(_FRAME) / _FRAME) + 1e-12
    shortest, longest = SAMPLE_RATE // _HIGHEST_HZ, SAMPLE_RATE // _LOWEST_HZ
    lags = correlation[:, shortest : longest + 1]
    best = lags.max(axis=1)
    # The first lag that is about as good as the best is the period; the others are its multiples.
    first = (lags > 0.9 * best[:, None]).argmax(axis=1)
    rising = [_top_of(row, start) for row, start in zip(lags, first, strict=True)]
    voiced = best > _VOICED
    if not voiced.any():
        return 0.0
    return float(SAMPLE_RATE / (np.median(np.asarray(rising)[voiced]) + shortest))


def _top_of(row: "np.ndarray[tuple[int], np.dtype[np.float64]]", start: int) -> int:
    """Climb from ``start`` to the top of its peak."""
    while start + 1 < len(row) and row[start + 1] > row[start]:
        start += 1
    return start


def ends_right(samples: Samples, natural_seconds: float, *, ended: bool) -> bool:
    """Return whether speech ended by itself, about as long as it naturally takes, and not within a sound.

    Args:
        samples: The speech.
        natural_seconds: How long the synthesizer that the voice is learnt from takes for the same words.
        ended: It stopped before the limit of its length.
    """
    seconds = len(samples) / SAMPLE_RATE
    shortest, longest = (factor * natural_seconds for factor in _LENGTHS)
    if not ended or not shortest <= seconds <= longest:
        return False
    last = samples[-round(_LAST_SECONDS * SAMPLE_RATE) :]
    return float(np.sqrt(np.mean(last**2))) < _QUIET * float(np.abs(samples).max())


Hear = Callable[[Samples], str]
"""Writes down what a waveform says."""
Say = Callable[[str, str], Samples]
"""Says a text as the synthesizer that a voice of the checkpoint is learnt from."""

LEAST_RIGHT = {
    "text": 0.98,
    "typed": 0.95,
    "unknown": 0.95,
    "images": 0.90,
    "speech, trained voices": 0.95,
    "speech, other voices": 0.85,
    "silence around": 0.95,
    "telephone": 0.85,
    "noise at 20 dB": 0.95,
    "noise at 10 dB": 0.85,
    "other devices": 0.85,
    "nobody speaks": 0.95,
}
MOST_WORD_ERROR, MOST_READ_ERROR = 0.05, 0.04
MOST_WORSE_STREAMED = 0.01
LEAST_ENDED, LEAST_TOLD_APART = 0.99, 0.99
SENTENCES = {
    "calculations": re.compile(r"(\w+ ){1,3}(plus|minus|times) "),
    "digits and counting": re.compile("you said |one two "),
    "images": re.compile("i see |it is |the |yes it is |no it is "),
}
SENTENCES["other sentences"] = re.compile("(?!" + "|".join(each.pattern for each in SENTENCES.values()) + ")")
"""Kinds of replies, by how they begin."""
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class Score:
    """A row of the table: ``count`` of ``of``, and the bound that it has to keep, if any."""

    name: str
    count: int
    of: int
    least: float | None = None
    most: float | None = None

    @property
    def value(self) -> float:
        """The share."""
        return self.count / max(1, self.of)

    def __str__(self) -> str:
        """The share, and of how many."""
        return f"{self.value:.1%} ({self.count} of {self.of})"

    @property
    def bound(self) -> str:
        """The bound in words; empty without."""
        if self.least is not None:
            return f"at least {self.least:.0%}"
        return "" if self.most is None else f"at most {self.most:.1%}"

    @property
    def kept(self) -> bool:
        """Whether it keeps its bound."""
        return self._keeps(0.0)

    @property
    def plausible(self) -> bool:
        """Whether it misses its bound by no more than chance explains where there are few cases."""
        return self._keeps(_DEVIATIONS)

    def _keeps(self, deviations: float) -> bool:
        for bound, sign in ((self.least, 1), (self.most, -1)):
            if bound is not None:
                slack = deviations * math.sqrt(bound * (1 - bound) / max(1, self.of))
                if sign * (self.value - bound) < -slack:
                    return False
        return True


def answer_figures(replies: Sequence[SpokenReply]) -> list[Score]:
    """Return how many answers are right: of each group, which has a bound, and of each kind in it."""
    found = []
    for group, least in LEAST_RIGHT.items():
        ours = [reply for reply in replies if _group(reply.asked.kind) == group]
        if not ours:
            continue
        found.append(_right(f"right: {group}", ours, least))
        for kind in dict.fromkeys(reply.asked.kind for reply in ours):
            if kind != group:
                found.append(_right(f"- {kind}", [reply for reply in ours if reply.asked.kind == kind]))
    return found


def _right(name: str, replies: Sequence[SpokenReply], least: float | None = None) -> Score:
    return Score(name, sum(reply.right for reply in replies), len(replies), least=least)


def _group(kind: str) -> str:
    if kind in LEAST_RIGHT:
        return kind
    first = kind.partition(",")[0]
    return "speech, other voices" if first == "speech" else first


def speech_figures(
    streamed: Sequence[SpokenReply],
    offline: Sequence[SpokenReply],
    speakers: Sequence[str],
    hear: Hear,
    hear_texts: Hear,
    say: Say,
) -> list[Score]:
    """Return how well the speech of replies is understood, ends, and is told apart.

    Args:
        streamed: Replies whose speech was sent while it was made.
        offline: The same questions, spoken in one piece; may be none.
        speakers: The voices.
        hear: The listener.
        hear_texts: One that expects words in any order.
        say: What the voices are learnt from.
    """
    hear = _remembering(hear)
    read = [reply for reply in streamed if reply.asked.is_read]
    long = [reply for reply in streamed if reply.text and reply.asked.is_long]
    apart = [reply.asked for reply in (*read, *long)]
    # Nothing is said where nothing was written, which the answers' figures count.
    streamed, offline = (
        [reply for reply in replies if reply.text and reply.asked.is_spoken and reply.asked not in apart]
        for replies in (streamed, offline)
    )
    natural = {(each.asked.speaker, each.text): say(each.asked.speaker, each.text) for each in streamed}
    found = []
    for speaker in speakers:
        ours = [reply for reply in streamed if reply.asked.speaker == speaker]
        theirs = [reply for reply in offline if reply.asked.speaker == speaker]
        originals = [(reply.text, natural[speaker, reply.text]) for reply in ours]
        found.append(_errors(f"word error: the synthesizer, {speaker}", originals, hear, None))
        found.append(_errors(f"word error: streamed, {speaker}", _said(ours), hear, MOST_WORD_ERROR))
        if theirs:
            whole = _errors(f"word error: offline, {speaker}", _said(theirs), hear, None)
            bound = whole.value + MOST_WORSE_STREAMED
            compared = [reply for reply in ours if reply.asked in {each.asked for each in theirs}]
            found += [whole, _errors(f"word error: streamed, same, {speaker}", _said(compared), hear, bound)]
    for what, ours in (
        ("texts", [reply for reply in read if not reply.asked.is_in_any_order]),
        ("words in any order", [reply for reply in read if reply.asked.is_in_any_order]),
    ):
        if ours:
            originals = [(reply.text, say(reply.asked.speaker, reply.text)) for reply in ours]
            floor = _errors(f"word error: {what} read by the synthesizer", originals, hear_texts, None)
            # A listener guesses words of a sentence; of words in any order it misses some of anybody's.
            most = MOST_READ_ERROR + (floor.value if ours[0].asked.is_in_any_order else 0.0)
            found += [floor, _errors(f"word error: {what} read aloud", _said(ours), hear_texts, most)]
    if long:
        found.append(_errors("word error: after long conversations", _said(long), hear, MOST_WORD_ERROR))
    for kind, begins in SENTENCES.items():
        ours = [reply for reply in streamed if begins.match(reply.text)]
        found.append(_errors(f"- word error: streamed, {kind}", _said(ours), hear, None))
    ended = sum(
        ends_right(
            reply.samples, len(natural[reply.asked.speaker, reply.text]) / SAMPLE_RATE, ended=reply.ended
        )
        for reply in streamed
    )
    found.append(Score("speech ends by itself, at the right place", ended, len(streamed), least=LEAST_ENDED))
    return [*found, *_told_apart(streamed, natural, speakers)]


def _remembering(hear: Hear) -> Hear:
    """Listen only once to a waveform that counts for several figures."""
    heard = cache(lambda data: hear(np.frombuffer(data, np.float32)))
    return lambda samples: heard(samples.tobytes())


def _said(replies: Sequence[SpokenReply]) -> list[tuple[str, Samples]]:
    return [(reply.text, reply.samples) for reply in replies]


def _errors(name: str, said: Sequence[tuple[str, Samples]], hear: Hear, most: float | None) -> Score:
    errors = sum(word_errors(text, hear(samples) if len(samples) else "") for text, samples in said)
    return Score(name, errors, sum(len(text.split()) for text, _ in said), most=most)


def _told_apart(
    replies: Sequence[SpokenReply], natural: Mapping[tuple[str, str], Samples], speakers: Sequence[str]
) -> list[Score]:
    """Return how many replies have the pitch of their own voice rather than of the other."""
    usual = {
        speaker: sorted(pitch(wave) for (who, _), wave in natural.items() if who == speaker)
        for speaker in speakers
    }
    middle = {speaker: found[len(found) // 2] for speaker, found in usual.items() if found}
    if len(middle) < 2:
        return []
    right = 0
    for reply in replies:
        heard = pitch(reply.samples)
        nearest = min(middle, key=lambda speaker: abs(heard / max(1.0, middle[speaker]) - 1))
        right += nearest == reply.asked.speaker
    return [Score("voices told apart by pitch", right, len(replies), least=LEAST_TOLD_APART)]
