"""What the stages did during a load."""

from typing import Final

import msgspec

from benchmarks.measure.counters import Counters
from shared.messages import STAGES

ACTIVITIES: Final = ("wait", "take", "model", "engine", "send")


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage's loop during a load.

    Attributes:
        name: Which stage.
        seconds: What its time went to, by activity, as ``omnirelay_stage_seconds_total`` tells it.
        steps: Steps of its engine.
        mean_batch: Requests in a step.
    """

    name: str
    seconds: dict[str, float]
    steps: int
    mean_batch: float


def stages_of(counted: Counters) -> list[Stage]:
    """The stages that counted something."""
    named = counted.labels("omnirelay_stage_seconds_total", "stage")
    return [_stage(name, counted) for name in STAGES if name in named]


def _stage(name: str, counted: Counters) -> Stage:
    steps = counted.get("omnirelay_stage_batch_requests_count", stage=name)
    return Stage(
        name=name,
        seconds={
            activity: counted.get("omnirelay_stage_seconds_total", stage=name, activity=activity)
            for activity in ACTIVITIES
        },
        steps=round(steps),
        mean_batch=_ratio(counted.get("omnirelay_stage_batch_requests_sum", stage=name), steps),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
