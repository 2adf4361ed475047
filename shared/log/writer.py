"""Log lines are written by their own thread, so that nobody waits for a slow reader."""

import io
import logging
import os
import queue
import select
import stat
import threading
import time
from collections.abc import Callable
from typing import Final

QUEUE_LINES: Final = 1024
"""Most lines that wait to be written; lines above that are dropped."""
TICK_S: Final = 1.0
_RETRY_S: Final = 0.2
"""How long the thread waits for room in a pipe before it checks for other work."""
_MAX_LINE: Final = 2**16
log = logging.getLogger(__name__)


class Descriptor:
    """A file descriptor to which whole lines are written; blocking or not."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._midway = False

    def write(self, data: bytes) -> None:
        """Write a line; wait while a pipe is full.

        Raises:
            OSError: It cannot be written; a part of it may have been.
        """
        view = memoryview(b"\n" + data if self._midway else data)
        while view:
            try:
                written = os.write(self._number, view)
            except BlockingIOError:
                select.select([], [self._number], [], _RETRY_S)
                continue
            # After a full disk, the next line must not continue the broken one.
            self._midway = True
            view = view[written:]
        self._midway = False


class LineWriter:
    """Takes lines from any thread without blocking, and writes them in order.

    Lines that cannot be written, because nobody reads or the disk is full, are dropped and counted; a notice
    reports their number once lines can be written again.

    Args:
        write: Writes a line; may block.
        notice: The notice for a number of dropped lines.
        tick: Called on the writer's thread about once a second; may add lines.

    Attributes:
        dropped: Number of dropped lines.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        notice: Callable[[int], str],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.dropped = 0
        self._write = write
        self._notice = notice
        self._tick = tick
        self._unsaid = 0
        self._reset()
        if hasattr(os, "register_at_fork"):
            # A forked child has no thread, and the lock may be held.
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # Signal handlers log too: the queue's methods are reentrant, and so is the lock.
        self._lines: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Queue a line, given without its end; never blocks."""
        if self._lines.qsize() >= QUEUE_LINES:
            self._drop()
        else:
            self._queue(line.encode(errors="backslashreplace") + b"\n")

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written; False after ``timeout_s``."""
        written = threading.Event()
        self._queue(written)
        return written.wait(timeout_s)

    @property
    def filling(self) -> bool:
        """Whether more than half of the queue is taken: a notice could only add to what is dropped."""
        return self._lines.qsize() > QUEUE_LINES // 2

    def _queue(self, item: bytes | threading.Event) -> None:
        self._lines.put(item)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()

    def _drop(self) -> None:
        with self._lock:
            self.dropped += 1
            self._unsaid += 1

    def _run(self) -> None:
        ticked = time.monotonic()
        while True:
            try:
                item = self._lines.get(timeout=TICK_S)
            except queue.Empty:
                item = b""
            if self._unsaid and not (item and self.filling):
                self._say_dropped()
            if isinstance(item, threading.Event):
                item.set()
            elif item:
                self._write_one(item)
            if time.monotonic() - ticked >= TICK_S:
                ticked = time.monotonic()
                self._tick()

    def _say_dropped(self) -> None:
        with self._lock:
            count, self._unsaid = self._unsaid, 0
        try:
            self._write(self._notice(count).encode(errors="backslashreplace") + b"\n")
        except OSError:  # Counted, and tried again with the next line.
            with self._lock:
                self._unsaid += count

    def _write_one(self, line: bytes) -> None:
        try:
            self._write(line)
        except OSError:  # Cannot be logged: it is counted.
            self._drop()


def unblock(*descriptors: int) -> None:
    """Let writes of this process to pipes be lost instead of waiting for a reader.

    The pipe is reopened if possible: the blocking mode belongs to a file description that others may share.
    """
    for number in descriptors:
        try:
            if not stat.S_ISFIFO(os.fstat(number).st_mode):
                continue
        except OSError as error:
            log.debug("no descriptor %d: %s", number, error)
            continue
        try:
            own = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            log.debug("cannot reopen descriptor %d: %s", number, error)
            os.set_blocking(number, False)
        else:
            os.dup2(own, number)
            os.close(own)


class LineStream(io.TextIOBase):
    """Replaces ``sys.stdout`` or ``sys.stderr`` (descriptor ``number``) and passes on whole lines."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, number: int, take: Callable[[str], None]) -> None:
        super().__init__()
        self._number = number
        self._take = take
        self._lock = threading.RLock()
        self._rest = ""

    def write(self, text: str, /) -> int:
        """Take text; complete lines are passed on at once."""
        with self._lock:
            # Progress bars return to the beginning of the line.
            *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
            if len(self._rest) > _MAX_LINE:
                lines.append(self._rest)
                self._rest = ""
            for line in lines:
                if line.strip():
                    self._take(line)
        return len(text)

    def fileno(self) -> int:
        """The descriptor that it replaces."""
        return self._number

    def writable(self) -> bool:
        """Yes."""
        return True

    def close(self) -> None:
        """Stay open: the stream belongs to the process."""
