"""The result of a check."""

from collections.abc import Iterator
from typing import Literal

import msgspec

Level = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report.

    Attributes:
        check: Its name, one word.
        level: ``problem``: it will not work as configured; ``warning``: it may not.
        what: The finding.
        advice: What to do; empty with ``ok``.
    """

    check: str
    level: Level
    what: str
    advice: str = ""


Findings = Iterator[Finding]


def ok(check: str, what: str) -> Finding:
    """A check that passed."""
    return Finding(check, "ok", what)


def warning(check: str, what: str, advice: str) -> Finding:
    """A possible fault."""
    return Finding(check, "warning", what, advice)


def problem(check: str, what: str, advice: str) -> Finding:
    """A fault."""
    return Finding(check, "problem", what, advice)
