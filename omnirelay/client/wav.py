"""PCM to PCM16 and WAV files, without NumPy."""

import io
import sys
import wave
from array import array
from pathlib import Path
from typing import Final

from omnirelay.errors import OutputError
from omnirelay.values import SAMPLE_RATE

PCM_PEAK: Final = 32_767


def pcm16(waveform: bytes) -> bytes:
    """Convert float32 to PCM16, both little-endian; clipped to [-1, 1]."""
    samples = array("f", waveform)
    if sys.byteorder == "big":
        samples.byteswap()
    peak = PCM_PEAK
    shorts = array("h", [round(max(-1.0, min(1.0, sample)) * peak) for sample in samples])
    if sys.byteorder == "big":
        shorts.byteswap()
    return shorts.tobytes()


def require_wav(path: Path) -> None:
    """Check a path before there is anything to write.

    Raises:
        OutputError: It does not end in ``.wav``, or its folder does not exist.
    """
    if path.suffix.lower() != ".wav":
        raise OutputError(
            f"cannot write {path}: speech is written as WAV, give a name that ends in .wav "
            "(other formats come over HTTP: docs/api-speech.md)"
        )
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}, make it first")


def wav_bytes(waveform: bytes) -> bytes:
    """Return PCM, float32 little-endian, as a WAV file of 24 kHz mono PCM16."""
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(pcm16(waveform))
    return written.getvalue()


def write_wav(path: Path, waveform: bytes) -> None:
    """Write PCM, float32 little-endian, as 24 kHz mono PCM16.

    Raises:
        OutputError: The file cannot be written.
    """
    require_wav(path)
    try:
        path.write_bytes(wav_bytes(waveform))
    except (OSError, ValueError) as error:
        # ValueError: a zero byte in the path.
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"cannot write {path}: {reason}") from error
