"""Output for people, and for programs that read JSON."""

import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from omnirelay.cli.progress import set_aside
from omnirelay.client.types import TimedDoneEvent
from omnirelay.errors import OmniRelayError, StandardOutputError

MIB: Final = 2**20
GIB: Final = 2**30
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _StandardOutput:
    """State of the standard output.

    Attributes:
        midway: The last line is incomplete, as with streamed text.
    """

    midway = False

    def __init__(self) -> None:
        self.flush_first: Callable[[], None] = lambda: None


_output: Final = _StandardOutput()


def flush_before_output(flush: Callable[[], None]) -> None:
    """Set what flushes another writer of standard output before each line that is written here."""
    _output.flush_first = flush


def say(line: str, end: str = "\n") -> None:
    """Write to standard output and flush.

    Raises:
        BrokenPipeError: The reader closed the pipe.
        StandardOutputError: It cannot be written, as on a full disk.
    """
    _output.flush_first()
    with set_aside():
        try:
            sys.stdout.write(line + end)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            # Its buffer must not be written again at exit.
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end
            raise StandardOutputError(f"cannot write to the standard output: {error.strerror}") from error
        _output.midway = not (line + end).endswith("\n")


def printable(text: str) -> str:
    """A model's text; at a terminal, without control characters."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text


def note(line: str) -> None:
    """Write a line to standard error."""
    if _output.midway:
        say("")
    with set_aside():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def say_json(**fields: Any) -> None:
    """Write one JSON object per line."""
    say(json.dumps(fields, ensure_ascii=False))


def fail(error: OmniRelayError) -> int:
    """Report an error on standard error, if possible; returns the exit status 1."""
    _output.flush_first()
    with suppress(OSError):
        note(f"omnirelay: {error.code}: {error}")
    return 1


def timing_lines(done: TimedDoneEvent) -> list[str]:
    """The figures of an answer, one per line."""
    return [
        f"time to first text:  {_seconds(done.ttft_s)}",
        f"time to first audio: {_seconds(done.ttfa_s)}",
        f"audio length:        {_seconds(done.audio_seconds)}",
        f"wall time:           {_seconds(done.wall_s)}",
        f"prompt tokens:       {done.prompt_tokens:,}, {done.cached_prompt_tokens:,} of them cached",
    ]


def mebibytes(count: int) -> str:
    """A number of bytes in MiB."""
    return f"{count / MIB:,.0f} MiB"


def gibibytes(count: int) -> str:
    """A number of bytes in GiB."""
    return f"{count / GIB:,.1f} GiB"


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f} s"
