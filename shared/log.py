"""Logging of a process: one line a record, the stage's name in it, to standard error."""

import logging
import re
import sys
import warnings
from typing import Final

_OURS: Final = ("services", "gateway", "shared", "checkpoint", "__main__")


_SECRET: Final = re.compile(
    r"(?i)(authorization\W{1,4}(?:bearer\s+)?|bearer\s+|openai-insecure-api-key\.)[^\s'\",;]+|omr_[\w-]{8,}"
)
"""What a client proves itself with, as libraries write it at ``debug``, and keys of ours anywhere."""


class _Discreet(logging.Formatter):
    """Writes a record without what nobody may read."""

    def format(self, record: logging.LogRecord) -> str:
        """Write it."""
        return _SECRET.sub(lambda found: f"{found[1] or ''}***", super().format(record))


def configure_logging(process: str, level: str) -> None:
    """Set logging up once, at the start of a process.

    Libraries are heard from errors on, and whole at ``debug``: their warnings are about choices of
    ours, which a user can do nothing about.

    Args:
        process: Name of the process, e.g. ``thinker``.
        level: Name of the lowest level that OmniRelay itself writes.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Discreet(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper() if level == "debug" else logging.ERROR)
    for package in _OURS:
        logging.getLogger(package).setLevel(level.upper())
    if level != "debug":
        # PyTorch gives its loggers a level of their own; this one tells of every machine without a GPU.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
