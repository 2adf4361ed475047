"""How a process of the stack ends: it closes what is its own, in order, and leaves.

Neither is left to the interpreter.  Its own end destroys objects in an order that nobody chose, while threads
are stopped wherever they are, and waits for threads and locks of libraries for as long as these like.
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
"""How long a process may take to close what it has; then it is ended with status 1."""
TOGETHER_S: Final = 0.5
"""Signals within so long of the first are the same stop: an init tells all processes, a launcher its own."""
CHILDREN_S: Final = 2.0
"""How long workers of a library may take to end when they are told to."""
_STDERR: Final = 2
log = logging.getLogger(__name__)


def run_to_end(work: Callable[[], int]) -> NoReturn:
    """Do the work of a process, and end the process.

    Args:
        work: Gives the exit status.
    """
    status = 1
    try:
        status = work()
    except SystemExit as end:
        # Of argparse: its help, or arguments that it does not know.
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        log.exception("this process ends: an error that nobody expected")
    finally:
        end_process(status)


def limit_end() -> None:
    """Give this process :data:`END_S` to end; if it has not by then, tell where each thread is and end it.

    The limit needs neither the interpreter's lock nor any other.
    """
    faulthandler.dump_traceback_later(END_S, exit=True, file=_STDERR)


def end_process(status: int) -> NoReturn:
    """End this process now: nothing of it is destroyed, and nothing runs that was to run at its exit.

    Args:
        status: The exit status.
    """
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


def leave_on_signals() -> None:
    """Let SIGTERM and SIGINT end this process at once, with status 0: it has nothing that is to be closed."""
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
    """The start of a process, which SIGTERM and SIGINT end at any moment: with status 0, and in order.

    A signal comes between any two instructions: also between one that makes a socket and one that enters it
    into what is to be closed.  So while parts are made it waits until they are whole (:meth:`making`).
    Elsewhere, as in the seconds in which a model is loaded, it closes what there is, and ends the process.
    Nothing is raised: libraries catch exceptions, and clean up for as long as they like.

    To be made on the main thread.

    Attributes:
        closing: What is to be closed at the end of the process; it is closed only once.
    """

    def __init__(self) -> None:
        self.closing = ExitStack()
        self._told: signal.Signals | None = None
        self._making = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._tell)

    @contextmanager
    def making(self) -> "Iterator[None]":
        """Make parts, and enter them into :attr:`closing`; should be short."""
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
