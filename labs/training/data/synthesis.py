"""Speech from flite and espeak-ng, the two free synthesizers that the training data come from."""

import io
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from omnirelay.errors import CheckpointError

SAMPLE_RATE = 24_000
_PROGRAMS = {"flite": "flite", "espeak": "espeak-ng"}
_LONGEST_SECONDS = 30
_LOUD = 0.01
_BEFORE, _AFTER = 0.05, 0.1

Wave = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SynthesizerVoice:
    """A voice of a synthesizer; speed and pitch are factors of its own."""

    program: Literal["flite", "espeak"]
    name: str
    speed: float = 1.0
    pitch: float = 1.0

    def command(self, text: str, output: Path) -> list[str]:
        """Return the command that writes ``text`` as a WAV file."""
        if self.program == "flite":
            options = ["-voice", self.name, "--setf", f"duration_stretch={1 / self.speed:.3f}"]
            return ["flite", *options, "-t", text, "-o", str(output)]
        speed, pitch = round(150 * self.speed), round(min(99, 50 * self.pitch))
        return ["espeak-ng", "-v", self.name, "-s", str(speed), "-p", str(pitch), "-w", str(output), text]


def synthesize(voice: SynthesizerVoice, text: str, rate: int = SAMPLE_RATE) -> Wave:
    """Return ``text`` as spoken by ``voice``, in [-1, 1], with little silence at both ends.

    Raises:
        CheckpointError: the synthesizer is not installed, failed, or said nothing.
    """
    if shutil.which(_PROGRAMS[voice.program]) is None:
        missing = _PROGRAMS[voice.program]
        raise CheckpointError(f"{missing} not found; on Debian: apt-get install {missing}")
    with tempfile.TemporaryDirectory(prefix="omnirelay-speech-") as directory:
        path = Path(directory) / "speech.wav"
        done = subprocess.run(  # noqa: S603  (fixed programs, no shell)
            voice.command(text, path), capture_output=True, timeout=_LONGEST_SECONDS, check=False
        )
        if done.returncode or not path.is_file():
            reason = done.stderr.decode(errors="replace").strip()
            raise CheckpointError(
                f"{_PROGRAMS[voice.program]} could not say {text!r} as {voice.name}: {reason}"
            )
        samples, source_rate = soundfile.read(io.BytesIO(path.read_bytes()), dtype="float32")
    wave: Wave = soxr.resample(samples, source_rate, rate).astype(np.float32)
    return _without_silence(wave, rate, text)


def _without_silence(wave: Wave, rate: int, text: str) -> Wave:
    loud = np.flatnonzero(np.abs(wave) > _LOUD)
    if not len(loud):
        raise CheckpointError(f"the synthesizer said nothing for {text!r}")
    first = max(0, int(loud[0]) - round(_BEFORE * rate))
    return wave[first : int(loud[-1]) + round(_AFTER * rate)]


Speak = Callable[[SynthesizerVoice, str, int], Wave]
"""What :func:`synthesize` is: a voice says a text at a sample rate."""
