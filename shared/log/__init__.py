"""Logging of a process: one record per line, with the process's name, on standard error.

No secrets and no client input are logged, at any level.  Logging never blocks, and lines that others can
cause are rate-limited: see :func:`limited`.
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

_OURS: Final = ("services", "gateway", "shared", "checkpoint", "__main__")
_TALKATIVE: Final = {
    # Would log URLs with their queries.
    "uvicorn": logging.WARNING,
    "websockets": logging.WARNING,
    # Would log invalid headers for a collector, which hold keys.
    "opentelemetry.util.re": logging.CRITICAL,
}
"""Libraries that log client input or secrets, and the level from which they do not."""
LIMITED: Final = {"limited": ""}
"""The ``extra`` of a rate-limited line, as :func:`limited` sets it."""
FLUSH_S: Final = 1.0
"""How long the end of a process waits for its last lines."""
_STDOUT: Final = 1
_STDERR: Final = 2
log = logging.getLogger(__name__)


class _Handler(logging.Handler):
    """Passes records to the writer thread; rate-limits records of libraries and those of :func:`limited`."""

    configured: tuple[str, str, LogFormat]

    def __init__(self, formatter: TextFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._repeats: Repeats[logging.LogRecord] = Repeats()
        self.writer = LineWriter(Descriptor(_STDERR).write, self._dropped, self._report_repeats)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record."""
        kind = getattr(record, "limited", None if record.name.partition(".")[0] in _OURS else "")
        burst = getattr(record, "burst", BURST)
        try:
            if kind is None or self._repeats.admit((record.name, str(record.msg), kind), record, burst):
                self.write(record)
        except Exception:  # noqa: BLE001 - whatever an argument raises when it is written, its caller goes on
            self.handleError(record)

    def write(self, record: logging.LogRecord) -> None:
        """Write a record without a rate limit."""
        self.writer.put(self.format(record))

    def flush(self) -> None:
        """Write what is left at the end of the process, within :data:`FLUSH_S`."""
        self._report_repeats(at_once=True)
        self.writer.flush(FLUSH_S)

    def _dropped(self, count: int) -> str:
        return self.format(make_record(__name__, logging.WARNING, f"{count} lines dropped"))

    def _report_repeats(self, at_once: bool = False) -> None:
        for last, count in self._repeats.ended(at_once):
            try:
                more = f"{count} more like this in {INTERVAL_S:.0f} s, the last: {last.getMessage()}"
                self.write(make_record(last.name, last.levelno, more))
            except Exception:  # noqa: BLE001 - as in emit; the writer's thread goes on
                self.handleError(last)


class _Limited(logging.LoggerAdapter[logging.Logger]):
    """See :func:`limited`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Mark a record."""
        return msg, {**kwargs, "extra": {**LIMITED, **(self.extra or {}), **kwargs.get("extra", {})}}


def limited(logger: logging.Logger, burst: int = BURST) -> "logging.LoggerAdapter[logging.Logger]":
    """A logger for lines that others can cause as often as they like.

    Of lines with the same text (before arguments are inserted) the first ``burst`` in an interval are
    written; one line counts the rest.  ``extra={"limited": KIND}`` separates kinds with the same text.
    """
    return _Limited(logger, {"burst": burst})


def of_request(request_id: str) -> dict[str, str]:
    """The ``extra`` of a line about a request, the same for all its attempts."""
    return {"request_id": request_id.partition(".")[0]}


def configure_logging(process: str, level: str, form: LogFormat = "text") -> None:
    """Set up logging at the start of a process.

    Libraries log from errors on, because users cannot act on their warnings; with ``debug``, from info on.
    Output to ``sys.stdout`` and ``sys.stderr``, warnings and uncaught exceptions become log lines too.

    Args:
        process: Name of the process, e.g. ``thinker``.
        level: Lowest level of OmniRelay's own lines.
    """
    # Client texts are in the gateway; stages have tokens and files, and engines whose messages are needed.
    formatter = make_formatter(process, form, quiet=process == "gateway")
    handler = _the_handler()
    if handler is None:
        handler = _Handler(formatter)
        unblock(_STDOUT, _STDERR)
    handler.setFormatter(formatter)
    handler.configured = process, level, form
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO if level == "debug" else logging.ERROR)
    for library, quiet in _TALKATIVE.items():
        logging.getLogger(library).setLevel(max(quiet, root.level))
    for package in _OURS:
        logging.getLogger(package).setLevel(level.upper())
    _take_streams(handler)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda each: _log_uncaught(each.exc_type, each.exc_value, each.exc_traceback)
    logging.captureWarnings(True)
    if level != "debug":
        # PyTorch sets its own levels; this logger warns on every machine without a GPU.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")


def dropped_lines() -> int:
    """Lines that this process could not write."""
    handler = _the_handler()
    return handler.writer.dropped if handler is not None else 0


def logging_configuration() -> tuple[str, str, LogFormat] | None:
    """With what :func:`configure_logging` was called last, for a process that is to log as this one does."""
    handler = _the_handler()
    return None if handler is None else handler.configured


def _the_handler() -> _Handler | None:
    return next((each for each in logging.getLogger().handlers if isinstance(each, _Handler)), None)


def _take_streams(handler: _Handler) -> None:
    def taker(name: str) -> Callable[[str], None]:
        return lambda line: handler.write(make_record(name, logging.INFO, line))

    sys.stdout = cast(TextIO, LineStream(_STDOUT, taker("stdout")))
    sys.stderr = cast(TextIO, LineStream(_STDERR, taker("stderr")))


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    log.critical("uncaught exception", exc_info=(kind, error, trace) if error is not None else None)
