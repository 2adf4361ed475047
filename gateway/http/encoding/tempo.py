"""Speech made faster or slower without a change of its pitch, by FFmpeg's ``atempo``."""

from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omnirelay.errors import UnsupportedError
from shared.messages import SAMPLE_RATE

Floats = NDArray[np.float32]

SLOWEST_FILTER: Final = 0.5
"""What one ``atempo`` can do; slower speech takes two."""
PIECE: Final = 512
"""Samples given to the filter at once: it returns none before the next piece comes."""


def require_speed(speed: float, param: str) -> None:
    """Check that a speed, given in the field ``param``, is available.

    Raises:
        UnsupportedError: Its library is not installed.
    """
    if speed != 1 and find_spec("av") is None:
        raise UnsupportedError(
            "speed needs PyAV, which is not installed on the gateway (pip install av): leave it out", param
        )


class Tempo:
    """Changes the speed of one stream of samples; how it is cut into pieces changes nothing.

    Of n samples it makes ``round(n / speed)``.

    Args:
        speed: From 0.25 to 4; 2 is twice as fast.
    """

    def __init__(self, speed: float) -> None:
        import av  # noqa: PLC0415 - large and optional
        from av.filter import Graph  # noqa: PLC0415

        self._av = av
        self._speed = speed
        self._graph = Graph()
        step = f"sample_rate={SAMPLE_RATE}:sample_fmt=flt:channel_layout=mono:time_base=1/{SAMPLE_RATE}"
        steps = [self._graph.add("abuffer", step)]
        if speed < SLOWEST_FILTER:
            steps.append(self._graph.add("atempo", str(SLOWEST_FILTER)))
            speed /= SLOWEST_FILTER
        steps += [self._graph.add("atempo", str(speed)), self._graph.add("abuffersink")]
        self._graph.link_nodes(*steps).configure()
        self._source, self._sink = steps[0], steps[-1]
        self._rest: Floats = np.zeros(0, np.float32)
        self._taken = 0
        self._given = 0

    def push(self, samples: Floats) -> Floats:
        """Return the samples that are complete; both are float32, mono, at 24 kHz."""
        stream = np.concatenate([self._rest, samples])
        whole = len(stream) // PIECE * PIECE
        self._rest = stream[whole:]
        made = [self._filtered(stream[at : at + PIECE]) for at in range(0, whole, PIECE)]
        return self._cut(np.concatenate([stream[:0], *made]))

    def finish(self) -> Floats:
        """Return the rest; silence where the filter made too little."""
        left = self._rest.size
        # The filter takes no piece that it would make nothing of.
        made = [self._filtered(np.pad(self._rest, (0, PIECE - left)))] if left else []
        self._taken -= PIECE - left if left else 0
        self._source.push(None)
        last = self._cut(np.concatenate([self._rest[:0], *made, *self._pulled()]))
        return np.pad(last, (0, round(self._taken / self._speed) - self._given))

    def _filtered(self, piece: Floats) -> Floats:
        frame = self._av.AudioFrame.from_ndarray(
            np.ascontiguousarray(piece).reshape(1, -1), format="flt", layout="mono"
        )
        frame.sample_rate, frame.pts = SAMPLE_RATE, self._taken
        self._taken += piece.size
        self._source.push(frame)
        return np.concatenate([piece[:0], *self._pulled()])

    def _pulled(self) -> list[Any]:
        found: list[Any] = []
        while True:
            try:
                frame: Any = self._sink.pull()
            except (self._av.BlockingIOError, self._av.EOFError):
                # Both say that the filter has no more for now, or at all.
                return found
            found.append(frame.to_ndarray()[0])

    def _cut(self, made: Floats) -> Floats:
        """Return no more than the stretched length of what was taken."""
        kept = made[: round(self._taken / self._speed) - self._given]
        self._given += kept.size
        return kept
