"""The request state machine: moves are checked and time-stamped.

A state names the earliest stage that has not finished: a request whose text is incomplete is *thinking* even
if audio is already sent.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Final, Literal

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from omnirelay.errors import CancelledRequestError, DeadlineError, StateTransitionError
from shared.metrics import gauge

Reason = Literal["silent", "hung", "restarted", "left", "cut off", "failed"]
"""Why an attempt was lost at a stage."""


class RequestState(StrEnum):
    """The states of a request."""

    RECEIVED = "received"
    QUEUED = "queued"
    THINKING = "thinking"
    TALKING = "talking"
    SYNTHESIZING = "synthesizing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


_GIVEN_UP: Final = frozenset({RequestState.FAILED, RequestState.CANCELLED, RequestState.EXPIRED})
ENDED: Final = _GIVEN_UP | {RequestState.COMPLETED}
"""Final states."""
AT_STAGES: Final = frozenset({RequestState.THINKING, RequestState.TALKING, RequestState.SYNTHESIZING})

TRANSITIONS: Final[dict[RequestState, frozenset[RequestState]]] = {
    RequestState.RECEIVED: _GIVEN_UP | {RequestState.QUEUED},
    RequestState.QUEUED: _GIVEN_UP | {RequestState.THINKING},
    # Completed: without speech.
    RequestState.THINKING: _GIVEN_UP | {RequestState.TALKING, RequestState.COMPLETED},
    RequestState.TALKING: _GIVEN_UP | {RequestState.SYNTHESIZING},
    RequestState.SYNTHESIZING: _GIVEN_UP | {RequestState.COMPLETED},
    **{state: frozenset() for state in ENDED},
}


class StateCounts(Collector):
    """Number of requests by state: open ones now, ended ones since the start.

    Attributes:
        refused: Of those that failed, how many were refused.
    """

    def __init__(self) -> None:
        self.refused = 0
        self._counts: Counter[RequestState] = Counter()

    def moved(self, old: RequestState | None, new: RequestState) -> None:
        """Count a move; ``old`` is none for a new request."""
        if old is not None:
            self._counts[old] -= 1
        self._counts[new] += 1

    def report(self) -> dict[str, int]:
        """The counts by state; refused requests apart from those that failed."""
        counts = {state.value: self._counts[state] for state in RequestState}
        counts[RequestState.FAILED.value] -= self.refused
        return counts | {"refused": self.refused}

    def collect(self) -> Iterator[Metric]:
        """The metric of open requests."""
        counts = (
            ({"state": state.value}, self._counts[state]) for state in RequestState if state not in ENDED
        )
        yield gauge("omnirelay_requests", "Open requests by `state`.", counts)


class Lifecycle:
    """The state of one request, and when it entered each."""

    def __init__(self, counts: StateCounts, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = counts
        self._clock = clock
        self.state = RequestState.RECEIVED
        self.entered: dict[RequestState, float] = {RequestState.RECEIVED: clock()}
        self.received_at: Final = time.time()
        """Unix time."""
        counts.moved(None, self.state)

    def move(self, state: RequestState) -> None:
        """Enter a state; StateTransitionError if the move is not allowed."""
        if state not in TRANSITIONS[self.state]:
            raise StateTransitionError(f"a request that is {self.state} cannot become {state}")
        self._counts.moved(self.state, state)
        self.state = state
        self.entered[state] = self._clock()

    def offsets(self) -> dict[str, float]:
        """Seconds from *received* to each state entered."""
        start = self.entered[RequestState.RECEIVED]
        return {state.value: at - start for state, at in self.entered.items()}


def late_error(state: RequestState, deadline_s: float) -> DeadlineError:
    """The error of a request whose deadline passed in a state."""
    doing = "being checked" if state is RequestState.RECEIVED else state
    return DeadlineError(f"the deadline of {deadline_s:g} s passed while the request was {doing}")


def state_after(error: BaseException) -> RequestState:
    """The final state of a rejected request."""
    if isinstance(error, asyncio.CancelledError | CancelledRequestError):
        return RequestState.CANCELLED
    return RequestState.EXPIRED if isinstance(error, DeadlineError) else RequestState.FAILED
