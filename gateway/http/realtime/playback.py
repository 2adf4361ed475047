"""When a client plays an answer, and how loud it is."""

import time

import numpy as np

from gateway.http.realtime.items import BYTES_PER_S


class Playback:
    """The speech of one answer, which a client is taken to play as it comes, without a gap.

    Attributes:
        end: Monotonic time at which all that was sent so far has been played.
    """

    def __init__(self) -> None:
        self.end = 0.0
        self._power = 0.0

    def sent(self, pcm: bytes) -> None:
        """A piece was sent: int16, mono, 24 kHz."""
        self.end = max(self.end, time.monotonic()) + len(pcm) / BYTES_PER_S
        if pcm:
            samples = np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)
            self._power = max(self._power, float(np.mean(samples**2)))

    def stop(self) -> None:
        """What was not played yet will not be."""
        self.end = 0.0

    @property
    def power(self) -> float:
        """Mean square of the loudest piece, samples being from -1 to 1, while it is played; then 0."""
        return self._power if time.monotonic() < self.end else 0.0
