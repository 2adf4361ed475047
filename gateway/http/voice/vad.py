"""The voice in a stream of audio, window by window: Silero's detector, version 6 for 16 kHz, with NumPy.

The network is small: a spectrum, four convolutions and an LSTM cell, 310,000 numbers.  It says for each
window of 32 ms how probable speech is.  ``weights/`` has the file that Silero released (MIT), unchanged.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.http.voice.echo import EchoCanceller, SentAnswer, Verdict
from gateway.http.voice.resampling import TO_16_KHZ, Floats, Resampler
from shared.messages import SAMPLE_RATE

RATE: Final = 16_000
WINDOW: Final = 512
"""Samples of a window, 32 ms."""
CONTEXT: Final = 64
"""Samples before a window that are seen with it."""
HIDDEN: Final = 128
WEIGHTS: Final = Path(__file__).parent / "weights" / "silero_vad_16k.safetensors"
_FFT: Final = 256
_HOP: Final = 128
_BINS: Final = _FFT // 2 + 1
# Behind its last sample a window is mirrored.
_MIRRORED: Final = np.pad(np.arange(CONTEXT + WINDOW), (0, CONTEXT), mode="reflect")
_FRAMES: Final = _MIRRORED[_HOP * np.arange(4)[:, None] + np.arange(_FFT)]
"""Positions of a window's samples in each of its four frames."""


def _zeros() -> Floats:
    return np.zeros(HIDDEN, np.float32)


@dataclass
class VoiceState:
    """What the network keeps of one stream between two calls.

    Attributes:
        context: The last samples, ``[CONTEXT]``.
        hidden: The cell's output, ``[HIDDEN]``.
        cell: The cell's memory, ``[HIDDEN]``.
    """

    context: Floats = field(default_factory=lambda: np.zeros(CONTEXT, np.float32))
    hidden: Floats = field(default_factory=_zeros)
    cell: Floats = field(default_factory=_zeros)


class Silero:
    """The network; it keeps nothing of a stream, so that any number can share it."""

    def __init__(self, weights: Mapping[str, Floats]) -> None:
        self._spectrum = np.ascontiguousarray(weights["stft_conv.weight"][:, 0].T)
        self._convolutions = [
            (_matrix(weights[f"conv{at}.weight"]), weights[f"conv{at}.bias"], taps)
            for at, taps in ((1, _taps(4, 1)), (2, _taps(4, 2)), (3, _taps(2, 2)), (4, _taps(1, 1)))
        ]
        self._from_input = np.ascontiguousarray(weights["lstm_cell.weight_ih"].T)
        self._from_hidden = np.ascontiguousarray(weights["lstm_cell.weight_hh"].T)
        self._bias = weights["lstm_cell.bias_ih"] + weights["lstm_cell.bias_hh"]
        self._last = weights["final_conv.weight"][0, :, 0]
        self._last_bias = weights["final_conv.bias"][0]

    def probabilities(self, samples: Floats, state: VoiceState) -> Floats:
        """Return how probable speech is in each window, ``[n]``, and advance the stream's state.

        Args:
            samples: ``[n * WINDOW]``, from -1 to 1, 16,000 a second.
        """
        stream = np.concatenate([state.context, samples])
        state.context = stream[-CONTEXT:]
        starts = WINDOW * np.arange(samples.size // WINDOW)
        gates = self._features(stream[starts[:, None, None] + _FRAMES]) @ self._from_input + self._bias
        outputs = np.empty((len(starts), HIDDEN), np.float32)
        for at, gate in enumerate(gates):
            self._advance(gate, state)
            outputs[at] = state.hidden
        scores: Floats = np.maximum(outputs, 0) @ self._last + self._last_bias
        return _sigmoid(scores)

    def _features(self, frames: Floats) -> Floats:
        """Return what the cell sees of each window, ``[n, HIDDEN]``, from its frames, ``[n, 4, _FFT]``."""
        # One product of matrices each, which NumPy does much faster than a batch of them.
        bins = frames.reshape(-1, _FFT) @ self._spectrum
        values = np.sqrt(bins[:, :_BINS] ** 2 + bins[:, _BINS:] ** 2)
        for matrix, bias, taps in self._convolutions:
            columns = values.shape[-1]
            values = values.reshape(len(frames), -1, columns)
            padded = np.zeros((len(frames), values.shape[1] + 2, columns), np.float32)
            padded[:, 1:-1] = values
            values = np.maximum(padded[:, taps].reshape(-1, 3 * columns) @ matrix + bias, 0)
        return values

    def _advance(self, gates: Floats, state: VoiceState) -> None:
        gates = gates + state.hidden @ self._from_hidden
        opened = _sigmoid(gates)
        taken, kept, shown = opened[:HIDDEN], opened[HIDDEN : 2 * HIDDEN], opened[3 * HIDDEN :]
        state.cell = kept * state.cell + taken * np.tanh(gates[2 * HIDDEN : 3 * HIDDEN])
        state.hidden = shown * np.tanh(state.cell)


@cache
def silero() -> Silero:
    """Return the network, read from its file once."""
    return Silero(read_weights(WEIGHTS))


def read_weights(path: Path) -> dict[str, Floats]:
    """Read a file of float32 arrays in the safetensors format: length of the header, JSON, data."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    arrays = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            first, last = (begin + offset for offset in entry["data_offsets"])
            arrays[name] = np.frombuffer(data[first:last], "<f4").reshape(entry["shape"])
    return arrays


def _matrix(kernel: Floats) -> Floats:
    """Return a convolution's kernel, ``[out, in, 3]``, as a matrix ``[3 * in, out]``."""
    return np.ascontiguousarray(kernel.transpose(2, 1, 0).reshape(-1, len(kernel)))


def _taps(length: int, stride: int) -> NDArray[np.int64]:
    """Return the positions under a kernel of 3, ``[outputs, 3]``, in a padded input of this length."""
    return np.arange(0, length, stride)[:, None] + np.arange(3)


def _sigmoid(values: Floats) -> Floats:
    # Without overflow for large negative values, unlike 1 / (1 + exp(-x)).
    result: Floats = 0.5 * np.tanh(0.5 * values) + 0.5
    return result


WINDOW_MS: Final = 1000 * WINDOW // RATE
WINDOW_SAMPLES: Final = WINDOW * SAMPLE_RATE // RATE
"""Samples of a window in events, of 24,000 a second."""
WINDOW_BYTES: Final = 2 * WINDOW_SAMPLES


class Window(NamedTuple):
    """What was heard in 32 ms.

    Attributes:
        probability: Of speech.
        is_echo: Whether an answer's echo explains it; none if that is not known yet.
        before: The same of the windows before it, if they were judged again.
    """

    probability: float
    is_echo: bool | None = False
    before: Sequence[bool] = ()


def floats(pcm: bytes) -> Floats:
    """Return samples from -1 to 1 of int16."""
    return np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)


class VoiceStream:
    """One stream; the network's state goes on from call to call."""

    def __init__(self) -> None:
        self._state = VoiceState()
        self._canceller = EchoCanceller()
        self._resampler = Resampler(TO_16_KHZ)

    def windows(
        self, pcm: bytes, position: int = 0, answer: SentAnswer | None = None, at: int = 0
    ) -> list[Window]:
        """Return what is heard in whole windows, of :data:`WINDOW_BYTES` each: int16, mono, 24 kHz.

        Args:
            position: Of the first sample in the stream.
            answer: Whose echo may be heard.
            at: The time of the first sample, in samples, about.
        """
        samples = floats(pcm)
        verdicts = [Verdict()] * (samples.size // WINDOW_SAMPLES)
        if answer is not None:
            samples, verdicts = self._canceller.cancel(samples, position, answer, at)
        probabilities = silero().probabilities(self._resampler.push(samples), self._state)
        return [
            Window(each, *verdict) for each, verdict in zip(probabilities.tolist(), verdicts, strict=True)
        ]
