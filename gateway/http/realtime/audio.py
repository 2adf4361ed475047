"""The audio of a session: its formats, when a client plays the answers, and what was heard of them."""

import time
import unicodedata
from array import array
from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, Final, Literal

import msgspec
import numpy as np

from gateway.http.encoding.g711 import RATE, STEP, G711Decoder, Law
from gateway.http.voice.echo import EARLIEST_S, SentAnswer
from omnirelay.errors import InvalidRequestError
from shared.messages import SAMPLE_RATE

BetaName = Literal["pcm16", "g711_ulaw", "g711_alaw"]
Format = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
OF_BETA: Final[dict[BetaName, Format]] = {
    "pcm16": "audio/pcm",
    "g711_ulaw": "audio/pcmu",
    "g711_alaw": "audio/pcma",
}
LAWS: Final[dict[Format, Law]] = {"audio/pcmu": "pcmu", "audio/pcma": "pcma"}
BYTES_PER_S: Final = 2 * SAMPLE_RATE
"""Of audio in events: 16-bit samples."""
HEADER_BYTES: Final = 44
"""Of a WAV file."""
PIECE: Final = RATE
"""Codes that are decoded at once: a second of speech, which takes less than 2 ms."""


def milliseconds(size: int) -> int:
    """Return the length of so many bytes of audio."""
    return 1000 * size // BYTES_PER_S


class FormatFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's form."""

    type: Format = "audio/pcm"
    rate: int | None = None


def read_format(asked: FormatFields | BetaName, where: str) -> Format:
    """Return the format that is given in either form.

    Raises:
        InvalidRequestError: It has another rate.
    """
    if isinstance(asked, str):
        return OF_BETA[asked]
    rate = RATE if asked.type in LAWS else SAMPLE_RATE
    if asked.rate not in (None, rate):
        raise InvalidRequestError(
            f"{where}.rate of {asked.type} is {rate}, not {asked.rate}", f"{where}.rate"
        )
    return asked.type


def shown_format(name: Format) -> dict[str, Any]:
    """Return OpenAI's form, which has a rate for PCM only."""
    return {"type": name} if name in LAWS else {"type": name, "rate": SAMPLE_RATE}


def decoded_size(audio: bytes, name: Format) -> int:
    """Return how many bytes of samples :class:`InputDecoder` makes of audio."""
    return len(audio) * (2 * STEP if name in LAWS else 1)


class InputDecoder:
    """Makes a client's audio int16 samples, mono, at 24 kHz."""

    def __init__(self) -> None:
        self._law: Law | None = None
        self._decoder: G711Decoder | None = None

    def decode(self, audio: bytes, name: Format) -> Iterator[bytes]:
        """Yield the samples in pieces; the stream goes on from call to call, until the format changes."""
        law = LAWS.get(name)
        if law is None:
            self.clear()
            yield audio
            return
        if self._decoder is None or law != self._law:
            self._law, self._decoder = law, G711Decoder(law)
        for at in range(0, len(audio), PIECE):
            yield self._decoder.push(audio[at : at + PIECE])

    def clear(self) -> None:
        """The next audio continues nothing."""
        self._law = self._decoder = None


FRAME: Final = SAMPLE_RATE // 50
"""Samples of which the loudness is kept: 20 ms."""
QUIET: Final = 0.1
"""Silence before and behind the words is less loud than this share of the loudest frame."""
CHARACTER_MS: Final = 65.0
"""Of speech at speed 1, for each character; used where the end of the speech is not known."""
WIDE_CHARACTERS: Final = 3.0
"""As how many characters one of Chinese, Japanese or Korean counts: they are about a syllable each."""


class SentSpeech:
    """The speech of one answer that was sent: int16, mono, 24 kHz; its loudness is kept, not its samples.

    Args:
        speed: Of the speech.

    Attributes:
        size: Its bytes.
        complete: It is all that belongs to the text.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.size = 0
        self.complete = False
        self._speed = speed
        self._levels = array("f")
        self._rest = b""

    @property
    def ms(self) -> int:
        """Its length, rounded down."""
        return 1000 * self.size // (2 * SAMPLE_RATE)

    def push(self, pcm: bytes) -> None:
        """Add whole samples."""
        self.size += len(pcm)
        samples = np.frombuffer(self._rest + pcm, "<i2")
        frames = samples.size // FRAME
        whole = samples[: frames * FRAME].astype(np.float32).reshape(frames, FRAME)
        self._levels.extend(np.sqrt(np.mean(whole**2, axis=1)).tolist())
        self._rest = samples[frames * FRAME :].tobytes()

    def cut(self, text: str, end_ms: int) -> str:
        """Forget what comes after a time, and return the part of the text that was heard by then."""
        begin, end = self._sounding()
        end_s = end_ms / 1000
        units = list(_units(text))
        if self.complete:
            each_s = (end - begin) / max(sum(weight for _, weight in units), 1)
        else:
            each_s = CHARACTER_MS / 1000 / self._speed
        heard, at = "", begin
        for stop, weight in units:
            # Of a word that was cut, the greater part decides.
            if at + each_s * weight / 2 > end_s:
                break
            at += each_s * weight
            heard = text[:stop]
        self.size = end_ms * SAMPLE_RATE // 1000 * 2
        del self._levels[self.size // (2 * FRAME) :]
        self._rest = b""
        self.complete = True
        return heard

    def _sounding(self) -> tuple[float, float]:
        """Return when the first word begins and the last one ends, in seconds."""
        if not self._levels:
            return 0.0, self.size / (2 * SAMPLE_RATE)
        loud = np.flatnonzero(np.asarray(self._levels) >= QUIET * max(self._levels))
        return float(loud[0]) * FRAME / SAMPLE_RATE, float(loud[-1] + 1) * FRAME / SAMPLE_RATE


def _units(text: str) -> Iterator[tuple[int, float]]:
    """Yield where the words of a text end, and how many characters each counts as.

    A word of Chinese, Japanese or Korean is one character, since nothing shows where words end.
    """
    weight = 0.0
    for at, character in enumerate(text):
        if unicodedata.east_asian_width(character) in "WF":
            if weight:
                yield at, weight
                weight = 0.0
            yield at + 1, WIDE_CHARACTERS if character.isalpha() else 1.0
        elif character.isspace():
            if weight:
                yield at, weight + 1
                weight = 0.0
        else:
            weight += 1
    if weight:
        yield len(text), weight + 1


LATEST_S: Final = 1.0
"""An echo is heard at most so long after it could be played first, besides the advised start delay."""
KEPT_S: Final = 1.5
"""So much before what may be heard is compared."""
TAIL_S: Final = LATEST_S + 0.5
"""Client and network may be so late, and a room reverberate."""
_MOST_DELAY_S: Final = 2.0
"""Of the advised start delay, in which an echo is looked for."""
_SAMPLE_BYTES: Final = 2


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
