"""The life of a request as a state machine: every move is checked and time-stamped.

A state names the furthest upstream stage that has not finished: a request whose audio already flows
is still *thinking* while its text is not complete, because stages overlap.
"""

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Literal

from omnirelay.errors import StateTransitionError

Reason = Literal["silent", "hung", "restarted", "left", "cut off", "failed"]
"""Why a stage was lost to a request."""


class RequestState(StrEnum):
    """Where a request is."""

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
"""States without a way out."""
AT_STAGES: Final = frozenset({RequestState.THINKING, RequestState.TALKING, RequestState.SYNTHESIZING})
"""States in which the stages know the request."""

TRANSITIONS: Final[dict[RequestState, frozenset[RequestState]]] = {
    RequestState.RECEIVED: _GIVEN_UP | {RequestState.QUEUED},
    RequestState.QUEUED: _GIVEN_UP | {RequestState.THINKING},
    # An answer in text only is complete when the thinker is done.
    RequestState.THINKING: _GIVEN_UP | {RequestState.TALKING, RequestState.COMPLETED},
    RequestState.TALKING: _GIVEN_UP | {RequestState.SYNTHESIZING},
    RequestState.SYNTHESIZING: _GIVEN_UP | {RequestState.COMPLETED},
    **{state: frozenset() for state in ENDED},
}
"""Every allowed move."""


class StateCounts:
    """Counts requests by state: living ones now, ended ones since the start."""

    def __init__(self) -> None:
        self._counts: Counter[RequestState] = Counter()

    def moved(self, old: RequestState | None, new: RequestState) -> None:
        """Note a move; ``old`` is none for a new request."""
        if old is not None:
            self._counts[old] -= 1
        self._counts[new] += 1

    def report(self) -> dict[str, int]:
        """The number of requests for each state."""
        return {state.value: self._counts[state] for state in RequestState}


class Lifecycle:
    """The state of one request and when it entered each.

    Args:
        counts: Where the moves are counted.
        clock: Gives monotonic seconds.
    """

    def __init__(self, counts: StateCounts, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = counts
        self._clock = clock
        self.state = RequestState.RECEIVED
        self.entered: dict[RequestState, float] = {RequestState.RECEIVED: clock()}
        self.received_at: Final = time.time()
        """Unix time, for people."""
        counts.moved(None, self.state)

    @property
    def ended(self) -> bool:
        """No move is possible any more."""
        return self.state in ENDED

    @property
    def at_stages(self) -> bool:
        """The stages hold something of the request."""
        return self.state in AT_STAGES

    def move(self, state: RequestState) -> None:
        """Enter a state.

        Raises:
            StateTransitionError: No such move is allowed from the present state.
        """
        if state not in TRANSITIONS[self.state]:
            raise StateTransitionError(f"a request that is {self.state} cannot become {state}")
        self._counts.moved(self.state, state)
        self.state = state
        self.entered[state] = self._clock()

    def offsets(self) -> dict[str, float]:
        """Seconds from *received* to each state that was entered."""
        start = self.entered[RequestState.RECEIVED]
        return {state.value: at - start for state, at in self.entered.items()}
