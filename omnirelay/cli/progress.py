"""A progress line at the bottom of a terminal, on standard error.

Nothing is shown where standard error is no terminal that can rewrite a line.
"""

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Self

TICK_S: Final = 0.2
LEAVE_S: Final = 1.0
ERASE: Final = "\r\x1b[K"
log = logging.getLogger(__name__)


class ProgressLine:
    """Shows a line with the elapsed seconds while a ``with`` block runs.

    Args:
        describe: Gives the text; an empty one hides the line.  Called on another thread.
        patience_s: Nothing is shown before.

    Attributes:
        visible: There is a terminal to show it on.
    """

    def __init__(self, describe: Callable[[], str], patience_s: float = 0.0) -> None:
        self.visible: Final = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._describe = describe
        self._patience_s = patience_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self.visible:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.visible:
            # A terminal may have stopped reading.
            self._thread.join(LEAVE_S)

    def _run(self) -> None:
        began = time.monotonic()
        wait = self._patience_s
        try:
            while not self._over.wait(wait):
                wait = TICK_S
                # Not while others write.
                with _line.lock:
                    text = self._describe()
                    _line.draw(f"{text} ({time.monotonic() - began:.0f} s)" if text else "")
            _line.draw("")
        except OSError as error:
            log.debug("the terminal is gone: %s", error)


@contextmanager
def set_aside() -> Iterator[None]:
    """Hide the line while something else is written; it comes back by itself."""
    with _line.lock:
        _line.draw("")
        yield


class _Line:
    """The terminal's one progress line."""

    def __init__(self) -> None:
        self.lock: Final = threading.RLock()
        self._drawn = False

    def draw(self, text: str) -> None:
        with self.lock:
            if self._drawn or text:
                sys.stderr.write(ERASE + text[: shutil.get_terminal_size().columns - 1])
                sys.stderr.flush()
                self._drawn = bool(text)


_line: Final = _Line()
