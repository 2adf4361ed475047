"""How many replicas a stage should have: a rule on load, queue and gaps in playback.

A stage gets one more replica when it was short for ``scale_up_after_s``, that is, at each look either

- its running and waiting requests fill more than :data:`HIGH` of its replicas' batches, or
- it is the fullest stage, and requests wait at a gateway or listeners had nothing left to play since the
  look before;

and one less when, for ``scale_down_after_s``, no stage was short and the remaining replicas would be filled
to at most :data:`LOW`.  A stage whose replicas are not all ready stays as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shared.messages import StageName

HIGH: Final = 0.75
LOW: Final = 0.5


@dataclass(frozen=True)
class Bounds:
    """What does not change of a stage.

    Attributes:
        lowest: Its fewest replicas.
        highest: Its most.
        batch: Requests that a replica computes at once.
    """

    lowest: int
    highest: int
    batch: int


@dataclass(frozen=True)
class StageSample:
    """One stage at one moment.

    Attributes:
        replicas: Its replicas, without those that drain.
        ready: How many of them take requests.
        requests: Those running and waiting there.
    """

    replicas: int
    ready: int
    requests: int


@dataclass(frozen=True)
class StackSample:
    """The stack at one moment.

    Attributes:
        at: When, in monotonic seconds.
        queued: Requests that wait at the gateways for a place.
        underruns: Gaps in playback, counted since some moment.
        stages: Each stage.
    """

    at: float
    queued: int
    underruns: int
    stages: Mapping[StageName, StageSample]


class Autoscaler:
    """The rule, with what it must remember between two looks.

    Args:
        bounds: Of the stages that are scaled.
        up_after_s: How long a stage must be short.
        down_after_s: How long it must have too much.
    """

    def __init__(self, bounds: Mapping[StageName, Bounds], up_after_s: float, down_after_s: float) -> None:
        self._bounds = bounds
        self._after = {1: up_after_s, -1: down_after_s}
        self._underruns: int | None = None
        self._since: dict[StageName, tuple[int, float]] = {}

    def wanted(self, look: StackSample) -> dict[StageName, int]:
        """The stages that should have another number of replicas, with that number."""
        # After the controller was lost it counts from zero again.
        gaps = self._underruns is not None and look.underruns > self._underruns
        self._underruns = look.underruns
        fills = {stage: self._fill(stage, look.stages[stage]) for stage in self._bounds}
        late = gaps or look.queued > 0
        short = {stage for stage, fill in fills.items() if fill > HIGH}
        if late:
            short |= {max(fills, key=lambda stage: fills[stage])} if fills else set()
        changes = {}
        for stage in self._bounds:
            direction = self._direction(stage, look.stages[stage], stage in short, bool(short))
            before, since = self._since.get(stage, (0, look.at))
            if direction != before:
                since = look.at
            self._since[stage] = direction, since
            if direction and look.at - since >= self._after[direction]:
                changes[stage] = look.stages[stage].replicas + direction
                del self._since[stage]
        return changes

    def _fill(self, stage: StageName, seen: StageSample) -> float:
        return seen.requests / (max(1, seen.replicas) * self._bounds[stage].batch)

    def _direction(self, stage: StageName, seen: StageSample, short: bool, any_short: bool) -> int:
        bounds = self._bounds[stage]
        if seen.ready != seen.replicas:
            return 0
        if short and seen.replicas < bounds.highest:
            return 1
        fewer = seen.replicas - 1
        if not any_short and fewer >= bounds.lowest and seen.requests <= LOW * fewer * bounds.batch:
            return -1
        return 0
