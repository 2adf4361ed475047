"""What a check of the set-up says."""

from collections.abc import Iterator
from typing import Literal

import msgspec

Level = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report.

    Attributes:
        check: Which check, in one word.
        level: ``problem``: it will not work, or not as the configuration says; ``warning``: it may.
        what: What was found.
        advice: What to do; empty if all is well.
    """

    check: str
    level: Level
    what: str
    advice: str = ""


Findings = Iterator[Finding]


def ok(check: str, what: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", what)


def warning(check: str, what: str, advice: str) -> Finding:
    """Something may go wrong."""
    return Finding(check, "warning", what, advice)


def problem(check: str, what: str, advice: str) -> Finding:
    """Something does not work."""
    return Finding(check, "problem", what, advice)
