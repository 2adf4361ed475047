"""The talker's scheduler: autoregressive, but never past the last conditioning row that has arrived."""

import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from services.talker.track import ConditioningTrack
from shared.stage.playback import PlaybackClock, has_slack
from shared.vllm.conditioning import SlotMap
from shared.vllm.pieces import PromptPieces
from shared.vllm.scheduling import StageScheduler

PLAYBACK_MARGIN_KEY: Final = "playback_margin_s"


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


class TalkerScheduler(StageScheduler):
    """vLLM's scheduler, which holds a request until the row of its next position is there.

    While some reply's listener has less than ``additional_config["playback_margin_s"]`` left to hear, those
    with more wait, and prompts are computed in pieces.

    A held request keeps its place and its KV blocks; if memory runs out it may be preempted like any
    other.  Its rows stay with its track until it ends, so that they can be written again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slot_map = SlotMap(self.kv_cache_config, self.kv_cache_manager)
        self._tracks: dict[str, ConditioningTrack] = {}
        self._clocks: dict[str, PlaybackClock] = {}
        self._margin_s = float(self.vllm_config.additional_config[PLAYBACK_MARGIN_KEY])
        self.pieces = PromptPieces(self)

    def forget_steps(self) -> None:
        """See :meth:`StageScheduler.forget_steps`."""
        super().forget_steps()
        self.pieces.forget_steps()

    def attach(self, engine_id: str, track: ConditioningTrack, clock: PlaybackClock) -> None:
        """Say where the rows of a request arrive and when it is due; right after it was added."""
        self._tracks[engine_id] = track
        self._clocks[engine_id] = clock

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
        could = {request.request_id: request for request in self.running if self.may_run(request)}
        ahead = has_slack({name: self._clocks[name].due for name in could}, self._margin_s)
        ready = {name: request for name, request in could.items() if name not in ahead}
        self.pass_over([request for request in self.running if request.request_id not in ready])
        soon = time.monotonic() + self._margin_s if self._margin_s else -math.inf
        due = [request for name, request in ready.items() if self._clocks[name].due <= soon]
        self.pieces.cut(list(ready.values()), due)
        output = super().schedule(throttle_prefills)
        self.pieces.begin()
        return TalkerStep(**vars(output), row_writes=self._plan_writes(output))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take what a step computed; the further ids of its frames are kept with the tracks."""
        self.pieces.end(scheduler_output)
        if isinstance(model_runner_output, TalkerOutput):
            for engine_id, codes in model_runner_output.further_codes.items():
                if (track := self._tracks.get(engine_id)) is not None:
                    track.further_codes.append(codes)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        return outputs

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
        return self._slot_map.slots(engine_id, start, stop), rows, track.ids(start, stop, positions)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._tracks.pop(request.request_id, None)
        self._clocks.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)
