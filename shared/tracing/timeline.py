"""When a process did what of a request; nothing of what was said."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

MAX_PHASES: Final = 64
"""Of one request in one process; the last one lasts until the end."""

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class Phase(NamedTuple):
    """What a process did of a request for some time; begin and end in nanoseconds of Unix time."""

    name: str
    began_ns: int
    ended_ns: int


class Timeline:
    """What a process does of a request, one thing after the other.

    The wall clock is read once, at the beginning; from there on the monotonic clock counts.

    Args:
        phase: What it begins with.
    """

    __slots__ = ("_began", "_began_ns", "_phases")

    def __init__(self, phase: str) -> None:
        self._began_ns = time.time_ns()
        self._began = time.monotonic()
        self._phases = [(phase, self._began)]

    def enter(self, phase: str, at: float | None = None) -> None:
        """Go on to the next phase.

        Args:
            phase: Its name.
            at: When, in seconds of the monotonic clock; none is now.
        """
        if len(self._phases) < MAX_PHASES:
            self._phases.append((phase, self._no_earlier(at)))

    def end(self) -> list[Phase]:
        """Give all phases, the last of which ends now."""
        times = [*(began for _, began in self._phases), self._no_earlier(None)]
        at = [self._began_ns + round((each - self._began) * 1e9) for each in times]
        return [Phase(name, *each) for (name, _), each in zip(self._phases, pairwise(at), strict=True)]

    def _no_earlier(self, at: float | None) -> float:
        """Now or another moment, but not before the last phase began."""
        return max(time.monotonic() if at is None else at, self._phases[-1][1])
