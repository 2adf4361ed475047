"""G.711: telephone speech, 8 bits a sample at 8 kHz, and its way from and to the gateway's 24 kHz."""

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from shared.messages import SAMPLE_RATE

Law = Literal["pcmu", "pcma"]
Int16 = NDArray[np.int16]
Floats = NDArray[np.float32]

RATE: Final = 8000
STEP: Final = SAMPLE_RATE // RATE
"""Samples at 24 kHz for each at 8 kHz."""
REACH: Final = 48
"""Samples at 24 kHz to each side that a resampled one depends on, 2 ms."""
CUTOFF: Final = 0.9 * RATE / SAMPLE_RATE
"""Of the low-pass, in shares of 12 kHz: 3.6 kHz."""


def _low_pass() -> Floats:
    time = np.arange(-REACH, REACH + 1)
    taps = np.sinc(CUTOFF * time) * np.kaiser(2 * REACH + 1, 6.0)
    return (taps / taps.sum()).astype(np.float32)


def _ulaw_values() -> Int16:
    codes = ~np.arange(256, dtype=np.uint8).astype(np.int32) & 0xFF
    magnitude = (((codes & 15) << 3) + 132 << ((codes >> 4) & 7)) - 132
    return np.where(codes & 128, -magnitude, magnitude).astype(np.int16)


def _alaw_values() -> Int16:
    codes = np.arange(256, dtype=np.int32) ^ 0x55
    segment, step = (codes >> 4) & 7, codes & 15
    magnitude = np.where(segment == 0, (step << 4) + 8, ((step << 4) + 0x108) << np.maximum(segment - 1, 0))
    return np.where(codes & 128, magnitude, -magnitude).astype(np.int16)


def _nearest(values: Int16) -> NDArray[np.uint8]:
    """Return the code whose value is nearest to each of the 2^16 samples, from the least on."""
    order = np.argsort(values, kind="stable")
    ascending = values[order].astype(np.int32)
    borders = (ascending[:-1] + ascending[1:] + 1) // 2
    found: NDArray[np.uint8] = order[np.searchsorted(borders, np.arange(-(2**15), 2**15), "right")].astype(
        np.uint8
    )
    return found


_TAPS: Final = _low_pass()
_VALUES: Final[dict[Law, Int16]] = {"pcmu": _ulaw_values(), "pcma": _alaw_values()}
_CODES: Final = {law: _nearest(values) for law, values in _VALUES.items()}


def to_codes(samples: Int16, law: Law) -> bytes:
    """Return one byte for each sample: the code of the nearest value."""
    return _CODES[law][samples.astype(np.int32) + 2**15].tobytes()


def from_codes(codes: bytes, law: Law) -> Int16:
    """Return the sample of each byte."""
    return _VALUES[law][np.frombuffer(codes, np.uint8)]


class G711Decoder:
    """Makes a stream of codes samples at 24 kHz, which are 2 ms late."""

    def __init__(self, law: Law) -> None:
        self._law: Final[Law] = law
        self._before = np.zeros(2 * REACH, np.float32)

    def push(self, codes: bytes) -> bytes:
        """Return :data:`STEP` samples for each code: int16, little-endian, mono, 24 kHz."""
        stuffed = np.zeros(STEP * len(codes), np.float32)
        stuffed[::STEP] = STEP * from_codes(codes, self._law).astype(np.float32)
        stream = np.concatenate([self._before, stuffed])
        self._before = stream[len(stream) - 2 * REACH :]
        return _int16(_filtered(stream)).astype("<i2").tobytes()


class G711Encoder:
    """Makes codes of a stream of samples at 24 kHz: one for every three, the last one for what is left."""

    def __init__(self, law: Law) -> None:
        self._law: Final[Law] = law
        # Before the first sample is silence; a code needs as much behind it.
        self._stream = np.zeros(REACH, np.float32)

    def push(self, pcm: bytes) -> bytes:
        """Return the codes that depend on nothing later.

        Args:
            pcm: Whole samples: int16, little-endian, mono, 24 kHz.
        """
        self._stream = np.concatenate([self._stream, np.frombuffer(pcm, "<i2").astype(np.float32)])
        return self._take(max(0, (len(self._stream) - 2 * REACH - 1) // STEP + 1))

    def finish(self) -> bytes:
        """Return the rest of the codes."""
        count = -(-(len(self._stream) - REACH) // STEP)
        self._stream = np.concatenate([self._stream, np.zeros(REACH + STEP, np.float32)])
        return self._take(count)

    def _take(self, count: int) -> bytes:
        if not count:
            return b""
        used = self._stream[: STEP * (count - 1) + 2 * REACH + 1]
        self._stream = self._stream[STEP * count :]
        return to_codes(_int16(_filtered(used)[::STEP]), self._law)


def _filtered(stream: Floats) -> Floats:
    """Return a sample for each that has :data:`REACH` to both sides."""
    if len(stream) <= 2 * REACH:
        return np.zeros(0, np.float32)
    return np.convolve(stream, _TAPS, "valid")


def _int16(samples: Floats) -> Int16:
    return np.rint(np.clip(samples, -(2**15), 2**15 - 1)).astype(np.int16)
