"""Logging of a process: one record a line, the process's name in it, to standard error.

Nothing secret and nothing of what clients send is written, at any level.  Nobody waits for a line to be
written, and nobody can cause lines without a bound: see :func:`limited`.
"""

import logging
import sys
import threading
import warnings
from collections.abc import Callable, MutableMapping
from types import TracebackType
from typing import Any, Final, TextIO, cast

from shared.log.form import LogFormat, TextFormatter, make_formatter, make_record
from shared.log.repeats import BURST, INTERVAL_S, Repeats
from shared.log.writer import Descriptor, LineStream, LineWriter, unblock

__all__ = [
    "LIMITED",
    "LogFormat",
    "configure_logging",
    "dropped_lines",
    "limited",
    "of_request",
]

_OURS: Final = ("services", "gateway", "shared", "checkpoint", "__main__")
_TALKATIVE: Final = {
    # Addresses with their queries.
    "uvicorn": logging.WARNING,
    "websockets": logging.WARNING,
    # What it cannot read of the headers for a collector, where keys are.
    "opentelemetry.util.re": logging.CRITICAL,
}
"""Libraries that write what clients or secrets say, and from which level on they do not."""
LIMITED: Final = {"limited": ""}
"""The ``extra`` of a line that is written as by :func:`limited`."""
FLUSH_S: Final = 1.0
"""How long the end of a process waits for its last lines to be written."""
_STDOUT: Final = 1
_STDERR: Final = 2
log = logging.getLogger(__name__)


class _Handler(logging.Handler):
    """Gives records to the writer's thread; holds repetitions back that others can cause.

    These are the records of libraries, and ours that :func:`limited` wrote.

    Args:
        formatter: Writes records.
    """

    def __init__(self, formatter: TextFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._repeats: Repeats[logging.LogRecord] = Repeats()
        self._writer = LineWriter(Descriptor(_STDERR).write, self._dropped, self._tell_repeats)

    @property
    def dropped(self) -> int:
        """Lines that could not be written."""
        return self._writer.dropped

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record."""
        kind = getattr(record, "limited", None if record.name.partition(".")[0] in _OURS else "")
        burst = getattr(record, "burst", BURST)
        if kind is None or self._repeats.admit((record.name, str(record.msg), kind), record, burst):
            self.write(record)

    def write(self, record: logging.LogRecord) -> None:
        """Write a record in any case."""
        self._writer.put(self.format(record))

    def flush(self) -> None:
        """Write what is left at the end of the process, but do not wait for long."""
        self._tell_repeats(at_once=True)
        self._writer.flush(FLUSH_S)

    def _dropped(self, count: int) -> str:
        return self.format(make_record(__name__, logging.WARNING, f"{count} lines dropped"))

    def _tell_repeats(self, at_once: bool = False) -> None:
        for last, count in self._repeats.ended(at_once):
            more = f"{count} more like this in {INTERVAL_S:.0f} s, the last: {last.getMessage()}"
            self.write(make_record(last.name, last.levelno, more))


class _Limited(logging.LoggerAdapter[logging.Logger]):
    """See :func:`limited`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Mark a record."""
        return msg, {**kwargs, "extra": {**LIMITED, **(self.extra or {}), **kwargs.get("extra", {})}}


def limited(logger: logging.Logger, burst: int = BURST) -> "logging.LoggerAdapter[logging.Logger]":
    """Give what writes lines that somebody outside can cause as often as they like.

    Of those with the same words (before arguments are put in) the first few of an interval are written; the
    others are counted, and one line says how many they were.  ``extra={"limited": KIND}`` tells kinds apart
    that have the same words.

    Args:
        logger: Where the lines go.
        burst: How many of them are written in an interval.
    """
    return _Limited(logger, {"burst": burst})


def of_request(request_id: str) -> dict[str, str]:
    """Give the ``extra`` of a line about a request, whichever attempt at it."""
    return {"request_id": request_id.partition(".")[0]}


def configure_logging(process: str, level: str, form: LogFormat = "text") -> None:
    """Set logging up, at the start of a process.

    Libraries are heard from errors on: their warnings are about choices of ours, which a user can do nothing
    about.  At ``debug`` they are heard from information on; below that some write what passes through them.
    What is written to ``sys.stdout`` and ``sys.stderr``, warnings and exceptions that nobody caught become
    lines of the same form.

    Args:
        process: Name of the process, e.g. ``thinker``.
        level: Name of the lowest level that OmniRelay itself writes.
        form: The form of its lines.
    """
    # Texts of clients are in the gateway; stages have tokens and files, and engines whose words are needed.
    formatter = make_formatter(process, form, quiet=process == "gateway")
    handler = _the_handler()
    if handler is None:
        handler = _Handler(formatter)
        unblock(_STDOUT, _STDERR)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO if level == "debug" else logging.ERROR)
    for library, quiet in _TALKATIVE.items():
        logging.getLogger(library).setLevel(max(quiet, root.level))
    for package in _OURS:
        logging.getLogger(package).setLevel(level.upper())
    _take_streams(handler)
    sys.excepthook = _tell_uncaught
    threading.excepthook = lambda told: _tell_uncaught(told.exc_type, told.exc_value, told.exc_traceback)
    logging.captureWarnings(True)
    if level != "debug":
        # PyTorch gives its loggers a level of their own; this one tells of every machine without a GPU.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")


def dropped_lines() -> int:
    """Lines that this process could not write."""
    handler = _the_handler()
    return handler.dropped if handler is not None else 0


def _the_handler() -> _Handler | None:
    return next((each for each in logging.getLogger().handlers if isinstance(each, _Handler)), None)


def _take_streams(handler: _Handler) -> None:
    def taker(name: str) -> Callable[[str], None]:
        return lambda line: handler.write(make_record(name, logging.INFO, line))

    sys.stdout = cast(TextIO, LineStream(_STDOUT, taker("stdout")))
    sys.stderr = cast(TextIO, LineStream(_STDERR, taker("stderr")))


def _tell_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    log.critical(
        "an exception that nobody caught", exc_info=(kind, error, trace) if error is not None else None
    )
