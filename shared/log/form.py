"""The two forms of a log line: text, and JSON."""

import json
import logging
import re
import traceback
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal

LogFormat = Literal["text", "json"]

_SECRET: Final = re.compile(
    r"(?i)(authorization\W{1,4}(?:(?:basic|bearer)\s+)?|bearer\s+|openai-insecure-api-key\.)[^\s'\",;]+|omr_[\w-]{8,}"
)
"""Credentials of clients, as libraries log them at ``debug``, and our API keys anywhere."""


class TextFormatter(logging.Formatter):
    """``2026-03-01T14:02:11.123+01:00 INFO gateway gateway.manager: …``.

    Args:
        process: Name of the process.
        quiet: Of exceptions, write class and traceback but no message, which may quote client input.
    """

    def __init__(self, process: str, quiet: bool) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")
        self._process = process
        self._quiet = quiet

    def format(self, record: logging.LogRecord) -> str:
        """Write a record, without secrets."""
        return _without_secrets(super().format(record))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        """Local time with its zone, in ISO 8601."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")

    def formatException(  # noqa: N802  logging's name
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """See :meth:`logging.Formatter.formatException`."""
        if not self._quiet or ei[1] is None:
            return super().formatException(ei)
        lines: list[str] = []
        error: BaseException | None = ei[1]
        while error is not None:
            lines += [*traceback.format_tb(error.__traceback__), f"{type(error).__qualname__}\n"]
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
            lines += ["because of:\n"] if error is not None else []
        return "".join(lines).rstrip("\n")


class JsonFormatter(TextFormatter):
    """One JSON object per line: ``ts``, ``level``, ``process``, ``logger``, ``message``, and if present
    ``request_id`` and ``exception``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as an object."""
        fields: dict[str, Any] = {
            "ts": self.formatTime(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _without_secrets(record.getMessage()),
        }
        if request_id := getattr(record, "request_id", None):
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = _without_secrets(self.formatException(record.exc_info))
        return json.dumps(fields)


def make_formatter(process: str, form: LogFormat, quiet: bool = False) -> TextFormatter:
    """The formatter of a process; the arguments are those of :class:`TextFormatter`."""
    return (JsonFormatter if form == "json" else TextFormatter)(process, quiet)


def make_record(name: str, level: int, message: str) -> logging.LogRecord:
    """The record of a line that is already formatted."""
    return logging.LogRecord(name, level, "", 0, message, None, None)


def _without_secrets(text: str) -> str:
    return _SECRET.sub(lambda found: f"{found[1] or ''}***", text)
