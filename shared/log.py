"""Logging of a process: one line a record, the stage's name in it, to standard error.

Nothing secret and nothing of what clients send is written, at any level.
"""

import logging
import re
import sys
import traceback
import warnings
from types import TracebackType
from typing import Final

_OURS: Final = ("services", "gateway", "shared", "checkpoint", "__main__")
_TALKATIVE: Final = {
    # Addresses with their queries.
    "uvicorn": logging.WARNING,
    "websockets": logging.WARNING,
    # What it cannot read of the headers for a collector, where keys are.
    "opentelemetry.util.re": logging.CRITICAL,
}
"""Libraries that write what clients or secrets say, and from which level on they do not."""


_SECRET: Final = re.compile(
    r"(?i)(authorization\W{1,4}(?:bearer\s+)?|bearer\s+|openai-insecure-api-key\.)[^\s'\",;]+|omr_[\w-]{8,}"
)
"""What a client proves itself with, as libraries write it at ``debug``, and keys of ours anywhere."""


class _Formatter(logging.Formatter):
    """Writes of an exception where it was raised and its class.

    Its words are left out where they may quote what a client sent: who raised it did not think of the log.

    Args:
        process: Name of the process.
        quiet: Leave the words of exceptions out.
    """

    def __init__(self, process: str, quiet: bool) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s", "%H:%M:%S")
        self._quiet = quiet

    def format(self, record: logging.LogRecord) -> str:
        """Write a record without what clients prove themselves with."""
        return _SECRET.sub(lambda found: f"{found[1] or ''}***", super().format(record))

    def formatException(  # noqa: N802  logging's name
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
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


def configure_logging(process: str, level: str) -> None:
    """Set logging up once, at the start of a process.

    Libraries are heard from errors on: their warnings are about choices of ours, which a user can do nothing
    about.  At ``debug`` they are heard from information on; below that some write what passes through them.

    Args:
        process: Name of the process, e.g. ``thinker``.
        level: Name of the lowest level that OmniRelay itself writes.
    """
    handler = logging.StreamHandler(sys.stderr)
    # Texts of clients are in the gateway; stages have tokens and files, and engines whose words are needed.
    handler.setFormatter(_Formatter(process, quiet=process == "gateway"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO if level == "debug" else logging.ERROR)
    for library, quiet in _TALKATIVE.items():
        logging.getLogger(library).setLevel(max(quiet, root.level))
    for package in _OURS:
        logging.getLogger(package).setLevel(level.upper())
    if level != "debug":
        # PyTorch gives its loggers a level of their own; this one tells of every machine without a GPU.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
