"""Output for people, and for programs that read JSON."""

import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from omnirelay.cli.progress import set_aside
from omnirelay.client.types import TimedDoneEvent
from omnirelay.errors import OmniRelayError, StandardOutputError

MIB: Final = 2**20
GIB: Final = 2**30
_PARTS: Final = re.compile(r"\s|[\u1100-\u115f\u2e80-\uffef]|[^\s\u1100-\u115f\u2e80-\uffef]+")
"""A space, a letter of a script without spaces, or a run of others."""
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
    """Write a line to standard error, if that can be written; wrapped to the width of a terminal."""
    if _output.midway:
        say("")
    if sys.stderr.isatty():
        line = wrapped(line)
    with suppress(OSError), set_aside():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def columns() -> int:
    """The terminal's width; of a pipe or file, ``COLUMNS`` or 80."""
    return shutil.get_terminal_size().columns


def wrapped(text: str) -> str:
    """Break lines between words to fit the terminal."""
    return "\n".join(
        part
        for line in text.split("\n")
        for part in textwrap.wrap(line, columns(), break_long_words=False, break_on_hyphens=False) or [""]
    )


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Align rows in columns, the first row being the head; if that is too wide, one cell per line."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if sum(widths) + 2 * len(widths) - 2 > columns():
        head, *below = cells
        return [
            cell if name == head[0] else f"  {name}: {cell}"
            for row in below
            for name, cell in zip(head, row, strict=True)
        ]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


class WordWrap:
    """Breaks text that arrives in pieces between words, at a terminal's width.

    A word that outgrows its line is erased there and written on the next.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""

    def take(self, text: str) -> str:
        """Return what is to be written for one more piece."""
        # The last column stays free: there, terminals disagree where the cursor is.
        width = columns() - 1
        return "".join(self._part(part, width) for part in _PARTS.findall(text))

    def _part(self, part: str, width: int) -> str:
        if part.isspace():
            self._word = ""
            broken = part == "\n" or self._column >= width
            self._column = 0 if broken else self._column + 1
            return "\n" if broken else part
        wide = _cells(part) > len(part)
        if wide:
            # A script without spaces: lines break anywhere.
            self._word = ""
        before, self._word = self._word, "" if wide else self._word + part
        if self._column + _cells(part) <= width:
            self._column += _cells(part)
            return part
        erased = len(before)
        if erased == self._column and not wide:
            # Longer than a line: the terminal breaks it.
            self._column = (self._column + len(part)) % (width + 1)
            return part
        self._column = erased + _cells(part)
        return "\b" * erased + "\x1b[K\n" + before + part


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)


def say_json(**fields: Any) -> None:
    """Write one JSON object per line."""
    say(json.dumps(fields, ensure_ascii=sys.stdout.encoding.lower() != "utf-8"))


def fail(error: OmniRelayError, as_json: bool = False) -> int:
    """Report an error, and the notes that were added to it; return the exit status 1.

    Args:
        error: The error.
        as_json: On standard output as JSON; otherwise on standard error, if that can be written.
    """
    if as_json and not isinstance(error, StandardOutputError):
        say_json(event="error", code=error.code, message=str(error))
        return 1
    _output.flush_first()
    for line in (f"omnirelay: {error.code}: {error}", *getattr(error, "__notes__", ())):
        note(line)
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
