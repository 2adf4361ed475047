"""The talker's scheduler: autoregressive, but never past the last conditioning row that has arrived."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from services.talker.track import ConditioningTrack
from shared.vllm.generating import GeneratingScheduler


@dataclass(frozen=True)
class RowWrites:
    """Rows that the worker puts into KV memory before it computes a step."""

    slots: torch.Tensor  # int64 ``[n]``
    rows: torch.Tensor  # ``[n, width]``
    ids: torch.Tensor  # M-RoPE position ids, then the frames' further ids: int32 ``[3 + groups - 1, n]``


@dataclass
class TalkerStep(SchedulerOutput):
    """A step of the talker, and its rows; none if no position needs one."""

    row_writes: RowWrites | None = None


@dataclass
class TalkerOutput(ModelRunnerOutput):
    """What a step computed: the further ids of each sampled frame, by the engine's name of the request."""

    further_codes: dict[str, list[int]] = field(default_factory=dict)


class TalkerScheduler(GeneratingScheduler):
    """vLLM's scheduler, which holds a request until the row of its next position is there.

    While some reply's listener has less than ``additional_config["playback_margin_s"]`` left to hear, those
    with more wait, and prompts are computed in pieces.

    A held request keeps its place and its KV blocks; if memory runs out it may be preempted like any
    other.  Its rows stay with its track until it ends, so that they can be written again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tracks: dict[str, ConditioningTrack] = {}

    def condition(self, engine_id: str, track: ConditioningTrack) -> None:
        """Say where the rows of a request arrive; right after it was added."""
        self._tracks[engine_id] = track

    @property
    def held_bytes(self) -> int:
        """Bytes of all tracks."""
        return sum(track.nbytes for track in self._tracks.values())

    @property
    def held_rows(self) -> int:
        """Rows of all tracks; may be asked by another thread."""
        return sum(track.length for track in tuple(self._tracks.values()))

    def can_run(self, request: Request) -> bool:
        """Whether the row of a request's next position is there, and its token2wav keeps up."""
        track = self._tracks.get(request.request_id)
        has_row = track is not None and request.num_tokens <= track.available
        return has_row and super().can_run(request)

    def schedule(self, throttle_prefills: bool = False) -> TalkerStep:
        """Schedule a step of the requests that have their rows and whose token2wav keeps up."""
        ready = self.without_ahead([request for request in self.running if self.may_run(request)])
        output = self.schedule_only(ready, self.urgent(ready), throttle_prefills)
        return TalkerStep(**vars(output), row_writes=self._plan_writes(output))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take what a step computed; the further ids of its frames are kept with the tracks."""
        if isinstance(model_runner_output, TalkerOutput):
            for engine_id, codes in model_runner_output.further_codes.items():
                if (track := self._tracks.get(engine_id)) is not None:
                    track.further_codes.append(codes)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _plan_writes(self, output: SchedulerOutput) -> RowWrites | None:
        plans = []
        for engine_id, count in output.num_scheduled_tokens.items():
            plan = self.prepare(engine_id, partial(self._plan_request, engine_id, count))
            if plan is not None:
                plans.append(plan)
        if not plans:
            return None
        if len(plans) == 1:
            return RowWrites(*plans[0])
        slots, rows, ids = zip(*plans, strict=True)
        return RowWrites(torch.cat(slots), torch.cat(rows), torch.cat(ids, dim=1))

    def _plan_request(self, engine_id: str, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stop = self.requests[engine_id].num_computed_tokens
        start = stop - count
        track = self._tracks[engine_id]
        rows, positions = track.read(start, stop)
        return self.slot_map.slots(engine_id, start, stop), rows, track.ids(start, stop, positions)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._tracks.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)
