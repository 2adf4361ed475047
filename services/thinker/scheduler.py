"""The thinker's scheduler: autoregressive, and it knows which conditioning rows a step computed."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from shared.vllm.generating import GeneratingScheduler
from shared.vllm.sampling.arguments import arguments_of

EARLY_PRIORITY: Final = 10_000
"""Of prompts that are computed ahead of their requests: behind any request."""
EARLY_STEP_TOKENS: Final = 512
"""Most tokens of a step that computes prompts ahead: a request that comes meanwhile waits for no more."""


@dataclass(frozen=True)
class RowRead:
    """Rows of a request from position ``start`` on: slots int64 ``[n]`` of KV memory until the next step."""

    engine_id: str
    start: int
    slots: torch.Tensor


@dataclass
class ThinkerStep(SchedulerOutput):
    """A step, and the slots of all rows that become readable with it, in the order of ``take_reads``."""

    row_slots: torch.Tensor | None = None


class ThinkerScheduler(GeneratingScheduler):
    """vLLM's scheduler, which notes for each step the rows that became readable.

    A row is read once: the first time that its position is computed, or found in the prefix cache.
    After a preemption the rows already read are passed over.

    While some spoken reply is due within ``additional_config["playback_margin_s"]``, requests that are due
    later wait; and while one of these is written, prompts are computed in pieces.

    Prompts are computed ahead of their requests only in steps in which no request could run, and give their
    place and their memory to the first that can; what was computed of them stays in the prefix cache.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_until: dict[str, int] = {}
        self._reads: list[RowRead] = []

    def schedule(self, throttle_prefills: bool = False) -> ThinkerStep:
        """Schedule a step of the requests whose talker keeps up, and note its rows."""
        self._reads = []
        requests_run = self._requests_can_run()
        if requests_run:
            for request in [request for request in self.running if is_early(request)]:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
        ready = [request for request in self.running if self.may_run(request)]
        spoken = self.urgent(filter(_wants_rows, ready))
        if spoken:
            ready = self.without_ahead(ready)
        most = None if requests_run else EARLY_STEP_TOKENS
        output = self.schedule_only(ready, spoken, throttle_prefills, most)
        for engine_id in output.num_scheduled_tokens:
            request = self.requests[engine_id]
            if _wants_rows(request):
                self.prepare(engine_id, partial(self._note, request))
        slots = torch.cat([read.slots for read in self._reads]) if self._reads else None
        return ThinkerStep(**vars(output), row_slots=slots)

    def may_run(self, request: Request) -> bool:
        """Whether a request can be worked on now; a prompt that is computed early takes only what is free."""
        if not super().may_run(request) or not is_early(request):
            return super().may_run(request)
        placed = request in self.running or len(self.running) < self.max_num_active_reqs
        return placed and not self._requests_can_run()

    def may_displace(self, request: Request) -> bool:
        """Whether others may be preempted for a request: not for a prompt that is computed early."""
        return not is_early(request) and super().may_displace(request)

    def early_counts(self) -> tuple[int, int]:
        """How many prompts that are computed ahead run, and how many wait."""
        early = sum(is_early(request) for request in self.requests.values())
        running = sum(is_early(request) for request in self.running)
        return running, early - running

    def take_reads(self) -> list[RowRead]:
        """The rows that the last step made readable, which it has read; to be taken before the next one."""
        reads, self._reads = self._reads, []
        return reads

    def _requests_can_run(self) -> bool:
        may_run = super().may_run
        return any(not is_early(request) and may_run(request) for request in self.requests.values())

    def _note(self, request: Request) -> None:
        start = self._read_until.get(request.request_id, 0)
        stop = request.num_computed_tokens
        if stop <= start:
            return
        slots = self.slot_map.slots(request.request_id, start, stop)
        self._reads.append(RowRead(request.request_id, start, slots))
        self._read_until[request.request_id] = stop

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._read_until.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)


def is_early(request: Request) -> bool:
    """Whether a prompt is computed ahead of its request."""
    return bool(request.priority == EARLY_PRIORITY)


def _wants_rows(request: Request) -> bool:
    return arguments_of(request.sampling_params).wants_rows
