"""Smart Turn, version 3: a network that hears in a recording whether its speaker has finished.

It was trained on recordings that end with about 200 ms of silence; words and intonation both count.  Its
weights are a file of Pipecat's distribution, and not part of this one (docs/adr/0044).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gateway.fairness.thread import FairThread
from gateway.http.voice.resampling import TO_16_KHZ, Floats, Resampler
from gateway.http.voice.vad import RATE, WINDOW_BYTES, WINDOW_MS, floats
from gateway.requests.metrics import EndVerdict
from omnirelay.errors import ConfigError, MissingPackageError
from shared.config.gateway import AUTO
from shared.log import limited

SECONDS: Final = 8
"""The network sees the end of a recording only."""
SAMPLES: Final = SECONDS * RATE
_DISTRIBUTION: Final = "pipecat-ai"
_WEIGHTS: Final = "smart-turn-v3*-cpu.onnx"
_INPUT: Final = "input_features"
_FFT: Final = 400
_HOP: Final = 160
_MELS: Final = 80
_FRAMES: Final = SAMPLES // _HOP
_LINEAR_HZ: Final = 200 / 3
"""Hertz of a mel below :data:`_LOG_FROM_HZ`, on Slaney's scale."""
_LOG_FROM_HZ: Final = 1000.0
_LOG_STEP: Final = np.log(6.4) / 27


def _hertz(mels: Floats) -> Floats:
    above = mels - _LOG_FROM_HZ / _LINEAR_HZ
    hertz: Floats = np.where(above < 0, mels * _LINEAR_HZ, _LOG_FROM_HZ * np.exp(_LOG_STEP * above))
    return hertz


def _mel_filters() -> Floats:
    """Return triangular filters of equal area, ``[_FFT // 2 + 1, _MELS]``."""
    most = _LOG_FROM_HZ / _LINEAR_HZ + np.log(RATE / 2 / _LOG_FROM_HZ) / _LOG_STEP
    edges = _hertz(np.linspace(0, most, _MELS + 2))
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    bins = np.linspace(0, RATE / 2, _FFT // 2 + 1)[:, None]
    triangles = np.minimum((bins - left) / (centre - left), (right - bins) / (right - centre))
    return np.maximum(triangles, 0) * 2 / (right - left)


_FILTERS: Final = _mel_filters()
_HANN: Final = np.hanning(_FFT + 1)[:-1]


def log_mel(samples: Floats) -> Floats:
    """Return Whisper's features of the last 8 s, ``[80, 800]``: log10 of mel power, normalised.

    Args:
        samples: From -1 to 1, 16,000 a second; a shorter recording follows silence.
    """
    recent = samples[-SAMPLES:].astype(np.float64)
    recent = np.pad(recent, (SAMPLES - recent.size, 0))
    recent = (recent - recent.mean()) / np.sqrt(recent.var() + 1e-7)
    frames = sliding_window_view(np.pad(recent, _FFT // 2, mode="reflect"), _FFT)[::_HOP][:_FRAMES]
    power = np.abs(np.fft.rfft(frames * _HANN)) ** 2
    levels = np.log10(np.maximum(power @ _FILTERS, 1e-10))
    return np.ascontiguousarray((np.maximum(levels, levels.max() - 8).T + 4) / 4, np.float32)


class SmartTurn:
    """The network, computed by ONNX Runtime on one core.

    Args:
        where: The file of its weights, or ``auto`` for those of an installed ``pipecat-ai``.

    Raises:
        ConfigError: The file cannot be read, or is of another network.
        MissingPackageError: ONNX Runtime is not installed.
    """

    def __init__(self, where: Path | str) -> None:
        try:
            import onnxruntime  # noqa: PLC0415 - needs an extra, and takes long to load
        except ModuleNotFoundError as error:
            what = "onnxruntime (for gateway.turn_model)"
            raise MissingPackageError(what, "turns", "omnirelay-server") from error
        path = installed_weights() if where == AUTO else Path(where)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            # Bytes: a model cannot name further files then.
            self._session = onnxruntime.InferenceSession(
                path.read_bytes(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            # ONNX Runtime's errors have no class in common.
            raise ConfigError(f"gateway.turn_model: {path} cannot be loaded: {error}") from error
        if [each.name for each in self._session.get_inputs()] != [_INPUT]:
            raise ConfigError(f"gateway.turn_model: {path} is not Smart Turn v3: it has no input {_INPUT}")

    def finished(self, samples: Floats) -> float:
        """Return how probable it is that the speaker has finished, from 0 to 1; takes some ten milliseconds.

        Args:
            samples: The turn so far, from -1 to 1, 16,000 a second; with the pause behind it.
        """
        (found,) = self._session.run(None, {_INPUT: log_mel(samples)[None]})
        return float(found.ravel()[0])


def installed_weights() -> Path:
    """Return the file of weights in the installed ``pipecat-ai``, which is not loaded.

    Raises:
        ConfigError: It is not installed, or has none.
    """
    try:
        files = distribution(_DISTRIBUTION).files or []
    except PackageNotFoundError:
        files = []
    for each in files:
        if each.match(_WEIGHTS):
            return Path(str(each.locate()))
    raise ConfigError(
        f"gateway.turn_model: no installed {_DISTRIBUTION} has a file {_WEIGHTS}: "
        f"pip install --no-deps {_DISTRIBUTION}, or give the path of the file"
    )


HEARD_BYTES: Final = 1000 * SECONDS // WINDOW_MS * WINDOW_BYTES
"""Most audio that is heard: the end of the turn."""
LATE_S: Final = 0.4
"""A verdict that takes longer is not waited for: a silence ends the turn soon."""
MAX_WAITING: Final = 16
"""Pauses that wait for a verdict; a further one does without."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class EndDetector:
    """One thread; sessions take turns by client.

    Attributes:
        _network: As :meth:`SmartTurn.finished`; takes some ten milliseconds.
        _heard: Called with each verdict.
        _spent: Called with the seconds of a core that one took.
    """

    _network: Callable[[Floats], float]
    _heard: Callable[[EndVerdict], None]
    _spent: Callable[[float], None]
    _thread: FairThread = field(default_factory=lambda: FairThread("end-of-turn"))
    _waiting: int = 0

    async def finished(self, pcm: bytes, client: str) -> float | None:
        """Return how probable it is that the speaker has finished; none if that takes too long or fails.

        Args:
            pcm: The end of the turn in whole windows, at most :data:`HEARD_BYTES`: int16, mono, 24 kHz.
            client: Whose turn it is.
        """
        if self._waiting >= MAX_WAITING:
            self._heard("busy")
            return None
        self._waiting += 1
        try:
            async with asyncio.timeout(LATE_S):
                work = partial(self._probability, pcm)
                probability, seconds = await self._thread.timed(client, work)
        except TimeoutError:
            self._heard("late")
            limited(log).warning("the end of a turn was not heard in %.1f s: silence ends it", LATE_S)
            return None
        except Exception:  # noqa: BLE001 - ONNX Runtime's errors have no class in common
            self._heard("failed")
            limited(log).exception("the end of a turn could not be heard: silence ends it")
            return None
        finally:
            self._waiting -= 1
        self._spent(seconds)
        self._heard("finished" if probability >= 0.5 else "unfinished")
        return probability

    def _probability(self, pcm: bytes) -> float:
        return self._network(Resampler(TO_16_KHZ).push(floats(pcm)))
