"""How a process of the stack ends: it closes its own resources in order, then exits at once.

The interpreter's own shutdown is skipped: it destroys objects in arbitrary order while threads are stopped
anywhere, and waits for threads and locks of libraries without limit.
"""

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
END_S: Final = 8.0
"""How long a process may take to close its resources; then it exits with status 1."""
TOGETHER_S: Final = 0.5
"""Signals within this time count as one: an init signals all processes, and a launcher its own."""
CHILDREN_S: Final = 2.0
"""How long workers of a library may take to end after SIGTERM."""
_STDERR: Final = 2
log = logging.getLogger(__name__)


def run_to_end(work: Callable[[], int]) -> NoReturn:
    """Run ``work``, which returns the exit status, and end the process."""
    status = 1
    try:
        status = work()
    except SystemExit as end:
        # From argparse: its help, or unknown arguments.
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        log.exception("this process ends: unexpected error")
    finally:
        end_process(status)


def limit_end() -> None:
    """Give this process :data:`END_S` to end; then print the stack of every thread and exit.

    This needs neither the interpreter's lock nor any other.
    """
    faulthandler.dump_traceback_later(END_S, exit=True, file=_STDERR)


def end_process(status: int) -> NoReturn:
    """Exit at once with ``status``: no destructors, no exit handlers."""
    limit_end()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        _end_children()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)


def ending_of(status: int | None) -> str:
    """How a child process ended, in words, by its exit status; None while it runs."""
    if status is None:
        return "still runs"
    if status < 0:
        # Real-time signals are no members of it.
        return "was killed by " + next((s.name for s in signal.Signals if s == -status), f"signal {-status}")
    return f"ended with exit status {status}"


def leave_on_signals() -> None:
    """Let SIGTERM and SIGINT end this process at once with status 0; for one that has nothing to close."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: end_process(0))


def _end_children() -> None:
    """End the workers that libraries have started with multiprocessing."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    late = time.monotonic() + CHILDREN_S
    for child in children:
        child.join(max(0.0, late - time.monotonic()))
        child.kill()


class Start:
    """The start of a process, during which SIGTERM and SIGINT end it at any moment, with status 0.

    A signal may arrive between the instruction that opens a socket and the one that registers it for
    closing.  So a signal during :meth:`making` is deferred to its end; at any other time, as while a model is
    loaded, it closes what is registered and ends the process.  Nothing is raised: libraries catch exceptions.

    To be created on the main thread.

    Attributes:
        closing: What is closed at the end of the process, once.
    """

    def __init__(self) -> None:
        self.closing = ExitStack()
        self._told: signal.Signals | None = None
        self._making = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._tell)

    @contextmanager
    def making(self) -> "Iterator[None]":
        """Create parts and register them in :attr:`closing`; should be short."""
        self._making = True
        try:
            yield
        finally:
            self._making = False
        if self._told is not None:
            self._end(self._told)

    def _tell(self, number: int, _: Any) -> None:
        self._told = signal.Signals(number)
        if not self._making:
            self._end(self._told)

    def _end(self, number: signal.Signals) -> NoReturn:
        limit_end()
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        try:
            log.info("%s: stopped while loading", number.name)
            self.closing.close()
        except Exception:
            log.exception("not all could be closed")
        finally:
            end_process(0)
