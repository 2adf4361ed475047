"""The voice in a stream of audio, without the echo of answers, window by window."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.http.realtime.turns.echo import EchoCanceller, Verdict
from gateway.http.realtime.turns.playback import SentAnswer
from gateway.http.realtime.turns.silero import RATE, WINDOW, Floats, VoiceState, silero
from shared.messages import SAMPLE_RATE

WINDOW_MS: Final = 1000 * WINDOW // RATE
WINDOW_SAMPLES: Final = WINDOW * SAMPLE_RATE // RATE
"""Samples of a window in events, of 24,000 a second."""
WINDOW_BYTES: Final = 2 * WINDOW_SAMPLES
_STEP: Final = 3
"""Samples at 24 kHz that make two at 16 kHz."""
_REACH: Final = 15
_LENGTH: Final = 2 * _REACH + _STEP
_CUTOFF: Final = 0.92 * RATE / SAMPLE_RATE


def _low_pass() -> Floats:
    """Return the filters of both samples of a step, ``[_LENGTH, 2]``."""
    filters = []
    for centre in (_REACH, _REACH + _STEP / 2):
        time = np.arange(_LENGTH) - centre
        window = np.cos(np.clip(np.pi * time / (2 * _REACH + 2), -np.pi / 2, np.pi / 2)) ** 2
        taps = np.sinc(_CUTOFF * time) * window
        filters.append(taps / taps.sum())
    return np.stack(filters, axis=1).astype(np.float32)


_FILTERS: Final = _low_pass()
_STEPS: Final = _STEP * np.arange(WINDOW // 2)[:, None] + np.arange(_LENGTH)
"""Positions of the samples that each step of a window is made of."""


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


class Resampler:
    """Brings a stream of 24,000 samples a second to the rate of the networks."""

    def __init__(self) -> None:
        self._before = np.zeros(_LENGTH - _STEP, np.float32)

    def resampled(self, samples: NDArray[np.float32]) -> Floats:
        """Return the samples of whole windows at :data:`~gateway.http.realtime.turns.silero.RATE`."""
        stream = np.concatenate([self._before, samples])
        self._before = stream[len(stream) - len(self._before) :]
        starts = WINDOW_SAMPLES * np.arange(samples.size // WINDOW_SAMPLES)
        steps = stream[starts[:, None, None] + _STEPS]
        resampled: Floats = (steps.reshape(-1, _LENGTH) @ _FILTERS).reshape(-1)
        return resampled


def floats(pcm: bytes) -> Floats:
    """Return samples from -1 to 1 of int16."""
    return np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)


class VoiceStream:
    """One stream; the network's state goes on from call to call."""

    def __init__(self) -> None:
        self._state = VoiceState()
        self._canceller = EchoCanceller()
        self._resampler = Resampler()

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
        probabilities = silero().probabilities(self._resampler.resampled(samples), self._state)
        return [
            Window(each, *verdict) for each, verdict in zip(probabilities.tolist(), verdicts, strict=True)
        ]
