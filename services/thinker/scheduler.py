"""The thinker's scheduler: autoregressive, and it knows which conditioning rows a step computed."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from shared.vllm.conditioning import SlotMap
from shared.vllm.scheduling import StageScheduler

SPEECH = "speech"
"""Key of a request's extra sampling arguments: true if its rows are wanted."""


@dataclass(frozen=True)
class RowRead:
    """Rows that can be read after a step.

    Attributes:
        engine_id: The request, by the engine's name for it.
        start: Position of the first row.
        slots: int64 ``[n]``, where the rows lie in KV memory until the next step.
    """

    engine_id: str
    start: int
    slots: torch.Tensor


class ThinkerScheduler(StageScheduler):
    """vLLM's scheduler, which notes for each step the rows that became readable.

    A row is read once: the first time that its position is computed, or found in the prefix cache.
    After a preemption the rows already read are passed over.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slot_map = SlotMap(self.kv_cache_config, self.kv_cache_manager)
        self._read_until: dict[str, int] = {}
        self._reads: list[RowRead] = []

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step of the requests whose talker keeps up, and note its rows."""
        self.pass_over([request for request in self.running if self.is_stalled(request)])
        output = super().schedule(throttle_prefills)
        for engine_id in output.num_scheduled_tokens:
            request = self.requests[engine_id]
            if _wants_rows(request):
                self.prepare(engine_id, partial(self._note, request))
        return output

    def take_reads(self) -> list[RowRead]:
        """The rows that the last step made readable; to be read before the next one."""
        reads, self._reads = self._reads, []
        return reads

    def _note(self, request: Request) -> None:
        start = self._read_until.get(request.request_id, 0)
        stop = request.num_computed_tokens
        if stop <= start:
            return
        slots = self._slot_map.slots(request.request_id, start, stop)
        self._reads.append(RowRead(request.request_id, start, slots))
        self._read_until[request.request_id] = stop

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._read_until.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)


def _wants_rows(request: Request) -> bool:
    params = request.sampling_params
    return bool(params and params.extra_args and params.extra_args.get(SPEECH))
