"""The formats of a session's audio, by the names of OpenAI's API and of its beta."""

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from gateway.http.encoding.g711 import RATE, STEP, G711Decoder, Law
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
PIECE: Final = RATE
"""Codes that are decoded at once: a second of speech, which takes less than 2 ms."""


class FormatFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's form."""

    type: Format = "audio/pcm"
    rate: int | None = None


def read_format(fields: FormatFields | None, beta: BetaName | None, where: str) -> Format | None:
    """Return the format that is given in either form; none if none is.

    Raises:
        InvalidRequestError: It has another rate.
    """
    if fields is None:
        return None if beta is None else OF_BETA[beta]
    rate = RATE if fields.type in LAWS else SAMPLE_RATE
    if fields.rate not in (None, rate):
        raise InvalidRequestError(
            f"{where}.rate of {fields.type} is {rate}, not {fields.rate}", f"{where}.rate"
        )
    return fields.type


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
