"""Lines for people, and for programs that read JSON."""

import json
import os
import sys
import wave
from pathlib import Path
from typing import Any, Final

import numpy as np

from gateway.client.types import DoneEvent, Samples
from shared.errors import OmniRelayError, OutputError
from shared.messages import SAMPLE_RATE

PCM_PEAK: Final = 32_767
MIB: Final = 2**20


def say(line: str, end: str = "\n") -> None:
    """Write to standard output, at once."""
    sys.stdout.write(line + end)
    sys.stdout.flush()


def announce(line: str) -> None:
    """Write to standard output, if anyone still reads it.

    For who looks after other processes: ``omnirelay up | tee log`` loses its reader to the same Ctrl-C that
    asks it to stop, and must stop all the same.
    """
    try:
        say(line)
    except BrokenPipeError:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end


def say_json(**fields: Any) -> None:
    """Write one JSON object on a line of its own."""
    say(json.dumps(fields, ensure_ascii=False))


def fail(error: OmniRelayError) -> int:
    """Tell an error on standard error; gives the exit status 1."""
    sys.stderr.write(f"omnirelay: {error.code}: {error}\n")
    return 1


def write_wav(path: Path, samples: Samples) -> None:
    """Write a waveform as 24 kHz mono PCM16, making its directory if need be.

    Raises:
        OutputError: The file cannot be written.
    """
    pcm = np.rint(np.clip(samples, -1, 1) * PCM_PEAK).astype("<i2")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(SAMPLE_RATE)
            file.writeframes(pcm.tobytes())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def timing_lines(done: DoneEvent) -> list[str]:
    """The figures of an answer, one a line."""
    return [
        f"time to first text:  {_seconds(done.ttft_s)}",
        f"time to first audio: {_seconds(done.ttfa_s)}",
        f"audio length:        {_seconds(done.audio_seconds)}",
        f"wall time:           {_seconds(done.wall_s)}",
        f"prompt tokens:       {done.prompt_tokens:,}, {done.cached_prompt_tokens:,} of them cached",
    ]


def mebibytes(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / MIB:,.0f} MiB"


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f} s"
