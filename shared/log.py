"""Logging of a process: one line a record, the stage's name in it, to standard error."""

import logging
import sys


def configure_logging(process: str, level: str) -> None:
    """Set the root logger up once, at the start of a process.

    Args:
        process: Name of the process, e.g. ``thinker``.
        level: Name of the lowest level that is written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
