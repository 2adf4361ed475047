"""The output of a launcher: its own lines and those of its processes.

A reader that does not read never blocks the launcher, and an output error never ends it.
"""

import io
import json
import logging
import sys
import time
from contextlib import suppress
from typing import Any, Final

from omnirelay.cli.output import flush_before_output
from omnirelay.cli.progress import set_aside
from omnirelay.errors import OmniRelayError
from shared.log.form import LogFormat, make_formatter, make_record
from shared.log.writer import Descriptor, LineWriter

FLUSH_S: Final = 2.0
"""Longest wait for lines that are not read, before other output and at the end."""
RETRY_S: Final = 0.2
_NAME: Final = "launcher"
_COLOURS: Final = {"gateway": 36, "thinker": 33, "talker": 32, "token2wav": 35}
"""ANSI colours of the processes' names, on a terminal."""


class Console:
    """Writes lines to standard output on a thread of its own.

    Attributes:
        form: The log format; None writes the launcher's own lines unchanged.
    """

    def __init__(self) -> None:
        self.form: LogFormat | None = None
        self._descriptors: dict[int, Descriptor] = {}
        self._writer: Final = LineWriter(
            self._write, lambda count: self._own(f"{count} lines dropped", logging.WARNING)
        )

    def announce(self, line: str, level: int = logging.INFO) -> None:
        """Write a line of the launcher's own."""
        self._writer.put(self._own(line, level))

    def report(self, error: OmniRelayError) -> None:
        """Write the error that ends the launcher, and wait until it is written."""
        self._writer.put(self._own(f"{error.code}: {error}", logging.ERROR))
        self.flush()

    def show(self, name: str, line: str) -> None:
        """Write a line of a process."""
        if self.form == "json":
            self._writer.put(_as_object(name, line))
            return
        label = f"[{name}]"
        if sys.stdout.isatty():
            label = f"\x1b[{_COLOURS[name.partition(' ')[0]]}m{label}\x1b[0m"
        self._writer.put(f"{label} {line}")

    def flush(self) -> None:
        """Wait up to :data:`FLUSH_S` for lines not written yet."""
        self._writer.flush(FLUSH_S)

    @property
    def has_room(self) -> bool:
        """Whether lines of processes should be read; else those drop and count their own."""
        return not self._writer.filling

    def _own(self, line: str, level: int) -> str:
        """Format a line of the launcher's own: bare at a terminal."""
        if self.form is None or (self.form == "text" and sys.stdout.isatty()):
            return line
        return make_formatter(_NAME, self.form).format(make_record(__name__, level, line))

    def _write(self, data: bytes) -> None:
        """Write a line, and try again while that fails, as on a full disk."""
        while True:
            with set_aside():
                try:
                    number = sys.stdout.fileno()
                except io.UnsupportedOperation:
                    # Not a file, as when the output is captured.
                    sys.stdout.write(data.decode())
                    return
                try:
                    self._descriptors.setdefault(number, Descriptor(number)).write(data)
                except OSError:  # It is the output that fails, so it cannot be logged.
                    time.sleep(RETRY_S)
                else:
                    return


def _as_object(name: str, line: str) -> str:
    """Return a process's line as a JSON object with the launcher's name for the process."""
    fields: dict[str, Any] | None = None
    if line.startswith("{"):
        with suppress(ValueError, RecursionError):
            fields = json.loads(line)
    if fields is None or "process" not in fields:
        return make_formatter(name, "json").format(make_record("output", logging.INFO, line))
    return line if fields["process"] == name else json.dumps(fields | {"process": name})


console: Final = Console()
announce: Final = console.announce
flush_before_output(console.flush)


def hide(name: str, line: str) -> None:
    """Show nothing: the error of a process that fails has its last lines."""
    del name, line
