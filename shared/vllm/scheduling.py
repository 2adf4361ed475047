"""What the three specialised schedulers have in common: one request's failure is its own."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from prometheus_client.core import Metric
from vllm.exceptions import VLLMClientError
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from omnirelay.errors import OmniRelayError, StageFailedError
from shared.log import of_request
from shared.messages import StageName, gateway_of
from shared.metrics import Distribution, counter, gauge, histogram

EXPECTED: Final = (
    OmniRelayError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    VLLMClientError,
)
"""What preparing one request may raise: its inputs may be wrong in any way."""

BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Requests in a step."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class StageScheduler(Scheduler):
    """vLLM's scheduler, in which an error while preparing one request ends only that request.

    Attributes:
        batch_sizes: Requests of each step that computed something.
        preemptions: How often a request had to give its KV blocks back.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failures: dict[str, OmniRelayError] = {}
        self.batch_sizes = Distribution(BATCH_BUCKETS)
        self.preemptions = 0
        self._stalled: dict[str, tuple[Callable[[], bool], ...]] = {}
        self._was_empty = False
        self._passed_over: set[str] = set()
        # When each gateway had its last turn, in turns.
        self._turns: dict[str, int] = {}

    def follow(self, engine_id: str, *stalled: Callable[[], bool]) -> None:
        """Hold a request, once it was added, while a receiver of what it makes does not keep up.

        It keeps its place and its KV blocks, unless there is none for a request that could run.

        Args:
            engine_id: The request, by the engine's name.
            stalled: Each says whether one receiver does not.
        """
        self._stalled[engine_id] = stalled

    def is_stalled(self, request: Request) -> bool:
        """Whether a receiver of what a request makes does not keep up."""
        return any(stalled() for stalled in self._stalled.get(request.request_id, ()))

    def may_run(self, request: Request) -> bool:
        """Whether a request can be worked on now, if there is room for it."""
        return not self.is_stalled(request)

    @property
    def has_ready(self) -> bool:
        """A step would compute something, or the worker must hear of an ended request."""
        if self.finished_req_ids or self.has_failures:
            return True
        return any(self.may_run(request) for request in self.requests.values())

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step, and count what is in it."""
        self._make_room()
        self._passed_over = self.out_of_turn()
        could = any(self.may_run(request) for request in self.requests.values())
        output = super().schedule(throttle_prefills)
        self._was_empty = could and not output.num_scheduled_tokens
        if output.num_scheduled_tokens:
            self.batch_sizes.observe(len(output.num_scheduled_tokens))
        if output.preempted_req_ids:
            self.preemptions += len(output.preempted_req_ids)
        return output

    def pass_over(self, held: Sequence[Request]) -> None:
        """Leave these running requests out of the step that is scheduled next, and no other."""
        upcoming = self.current_step + 1
        for request in self.running:
            # vLLM passes over a running request until this step: what it offers for pipelines.
            request.next_decode_eligible_step = upcoming
        for request in held:
            request.next_decode_eligible_step = upcoming + 1

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM asks whether a waiting request may start; it is skipped, not moved, if not."""
        able = self.may_run(request) and request.request_id not in self._passed_over
        return able and super()._handle_blocked_waiting_request(request)

    def out_of_turn(self) -> set[str]:
        """The waiting requests that do not start in this step, where places are short, so that others can.

        Of those with the same priority, one of the gateway with the fewest running requests is the next, and
        of the gateway that was not the next for longest: many requests of one do not keep others waiting.
        """
        waiting = sorted(
            each
            for each in self.waiting
            if self.may_run(each) and not self._is_blocked_waiting_status(each.status)
        )
        places = self.max_num_active_reqs - len(self.running)
        gateways = {gateway_of(each.request_id) for each in waiting}
        if len(waiting) <= places or len(gateways) < 2:
            return set()
        running = Counter(gateway_of(each.request_id) for each in self.running)
        # Of gateways that are gone nothing is kept.
        self._turns = {name: turn for name, turn in self._turns.items() if name in gateways}
        for _ in range(places):
            following = min(waiting, key=partial(_rank, running, self._turns))
            name = gateway_of(following.request_id)
            waiting.remove(following)
            running[name] += 1
            self._turns[name] = max(self._turns.values(), default=0) + 1
        return {each.request_id for each in waiting}

    def _make_room(self) -> None:
        """Let a stalled request give its place and its memory to one that waits and could run."""
        if len(self.running) < self.max_num_active_reqs and not self._was_empty:
            return
        stalled = [request for request in self.running if self.is_stalled(request)]
        if stalled and any(self.may_run(request) for request in self.waiting):
            self.running.remove(stalled[-1])
            self._preempt_request(stalled[-1], time.monotonic())

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._stalled.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def collect(self, stage: StageName) -> Iterator[Metric]:
        """What the scheduler tells Prometheus; asked by another thread."""
        labels = {"stage": stage}
        yield histogram(
            "omnirelay_stage_batch_requests",
            "Requests in a step of the engine that computed something.",
            [(labels, self.batch_sizes)],
        )
        if self.kv_cache_config.kv_cache_groups:
            yield gauge(
                "omnirelay_kv_cache_usage_ratio",
                "Share of the KV cache's blocks that requests hold now, from 0 to 1.",
                [(labels, self.get_kv_cache_usage())],
            )
            yield counter(
                "omnirelay_preemptions_total",
                "Times that a request had to give its KV blocks back and was computed again later.",
                [(labels, self.preemptions)],
            )

    @property
    def has_failures(self) -> bool:
        """Some request failed since :meth:`take_failures`."""
        return bool(self._failures)

    def take_failures(self) -> dict[str, OmniRelayError]:
        """The requests that failed since the last call, by the engine's name, with the reason."""
        failures, self._failures = self._failures, {}
        return failures

    def prepare(self, engine_id: str, work: Callable[[], T]) -> T | None:
        """Do a piece of work for one request.

        Returns:
            Its result, or none if it raised: the request has then ended, its blocks are free, and the
            reason is in the log and in :meth:`take_failures`.
        """
        try:
            return work()
        except EXPECTED as error:
            known = error if isinstance(error, OmniRelayError) else None
            reason = known or StageFailedError(f"the request could not be scheduled: {error!r}")
            unexpected, about = known is None, of_request(engine_id)
            log.warning("request %s failed: %s", engine_id, reason.for_log, exc_info=unexpected, extra=about)
            self._failures[engine_id] = reason
            self.finish_requests(engine_id, RequestStatus.FINISHED_ERROR)
            return None


def _rank(running: Mapping[str, int], turns: Mapping[str, int], request: Request) -> tuple[int, int, int]:
    """Where a waiting request stands; the smallest is the next."""
    name = gateway_of(request.request_id)
    return request.priority, running.get(name, 0), turns.get(name, 0)
