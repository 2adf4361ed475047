"""Lines for people, and for programs that read JSON."""

import json
import os
import re
import sys
import wave
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from gateway.cli.console import console
from gateway.cli.progress import set_aside
from gateway.client.types import DoneEvent, Samples
from shared.errors import OmniRelayError, OutputError, StandardOutputError
from shared.messages import SAMPLE_RATE

PCM_PEAK: Final = 32_767
MIB: Final = 2**20
GIB: Final = 2**30
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Output:
    """Where the standard output is.

    Attributes:
        midway: In the middle of a line, as a text that comes in pieces leaves it.
    """

    midway = False


_output: Final = _Output()


def say(line: str, end: str = "\n") -> None:
    """Write to standard output, at once.

    Raises:
        BrokenPipeError: Nobody reads it any more.
        StandardOutputError: It cannot be written, as on a full disk.
    """
    console.flush()
    with set_aside():
        try:
            sys.stdout.write(line + end)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            # What waits in it must not be tried again at the end.
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end
            raise StandardOutputError(f"cannot write to the standard output: {error.strerror}") from error
        _output.midway = not (line + end).endswith("\n")


def printable(text: str) -> str:
    """The text of a model, without what would steer a terminal if it is one that is written to."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text


def note(line: str) -> None:
    """Write a line to standard error: what is said beside the answer itself."""
    if _output.midway:
        say("")
    with set_aside():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def announce(line: str) -> None:
    """Write to standard output, for who looks after other processes: see :mod:`gateway.cli.console`."""
    console.announce(line)


def say_json(**fields: Any) -> None:
    """Write one JSON object on a line of its own."""
    say(json.dumps(fields, ensure_ascii=False))


def fail(error: OmniRelayError) -> int:
    """Tell an error on standard error, if it can be written there; gives the exit status 1."""
    console.flush()
    with suppress(OSError):
        note(f"omnirelay: {error.code}: {error}")
    return 1


def pcm16(samples: Samples) -> bytes:
    """Give a waveform as PCM16, little-endian."""
    return np.rint(np.clip(samples, -1, 1) * PCM_PEAK).astype("<i2").tobytes()


def require_wav(path: Path) -> None:
    """Refuse a file before there is anything to be written to it.

    Raises:
        OutputError: It is not called as a WAV file is, or its folder is not there.
    """
    if path.suffix.lower() != ".wav":
        raise OutputError(
            f"cannot write {path}: speech is written as WAV, give a name that ends in .wav "
            "(other formats come over HTTP: docs/api.md)"
        )
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}, make it first")


def write_wav(path: Path, samples: Samples) -> None:
    """Write a waveform as 24 kHz mono PCM16.

    Raises:
        OutputError: The file cannot be written.
    """
    require_wav(path)
    try:
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(SAMPLE_RATE)
            file.writeframes(pcm16(samples))
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


def gibibytes(count: int) -> str:
    """A larger number of bytes, for people."""
    return f"{count / GIB:,.1f} GiB"


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f} s"
