"""The phases of a request in one process; nothing of its content."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

MAX_PHASES: Final = 64
"""Per request and process; the last one lasts until the end."""

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class Phase(NamedTuple):
    """A phase of a request; begin and end in nanoseconds of Unix time."""

    name: str
    began_ns: int
    ended_ns: int


class Timeline:
    """The consecutive phases of a request.

    The wall clock is read once; after that the monotonic clock counts.
    """

    __slots__ = ("_began", "_began_ns", "_phases")

    def __init__(self, phase: str) -> None:
        self._began_ns = time.time_ns()
        self._began = time.monotonic()
        self._phases = [(phase, self._began)]

    def enter(self, phase: str, at: float | None = None) -> None:
        """Begin the next phase, now or at a monotonic second."""
        if len(self._phases) < MAX_PHASES:
            self._phases.append((phase, self._no_earlier(at)))

    def end(self) -> list[Phase]:
        """All phases; the last ends now."""
        times = [*(began for _, began in self._phases), self._no_earlier(None)]
        at = [self._began_ns + round((each - self._began) * 1e9) for each in times]
        return [Phase(name, *each) for (name, _), each in zip(self._phases, pairwise(at), strict=True)]

    def _no_earlier(self, at: float | None) -> float:
        """A moment (None is now), but not before the last phase began."""
        return max(time.monotonic() if at is None else at, self._phases[-1][1])
