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

MAX_EMPTY_STEPS: Final = 8
"""Steps in a row that compute nothing though a request could run and none can make room: then it fails."""
TRIAL_TOKENS: Final = 16
"""Tokens after which a request is past the place where it may have ended an engine."""
BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Requests in a step."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class StageScheduler(Scheduler):
    """vLLM's scheduler, in which an error while preparing one request ends only that request.

    A suspect, which may have ended an engine, is computed in steps of its own: see :meth:`take_turn`.

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
        # By the engine's name: ours.
        self._suspects: dict[str, str] = {}
        self._turn: str | None = None
        # Steps in a row that computed nothing though a request could run.
        self._empty_steps = 0
        self._passed_over: set[str] = set()
        # When each gateway had its last turn, in turns.
        self._turns: dict[str, int] = {}

    def forget_steps(self) -> None:
        """Begin anew with all that is counted and measured of steps."""
        self.batch_sizes = Distribution(BATCH_BUCKETS)
        self.preemptions = 0

    def follow(self, engine_id: str, *stalled: Callable[[], bool]) -> None:
        """Hold a request, once it was added, while a receiver of what it makes does not keep up.

        It keeps its place and its KV blocks, unless there is none for a request that could run.

        Args:
            engine_id: The request, by the engine's name.
            stalled: Each says whether one receiver does not.
        """
        self._stalled[engine_id] = stalled

    def suspect(self, engine_id: str, request_id: str) -> None:
        """Compute a request, by the engine's name and ours, alone until it has `TRIAL_TOKENS` tokens."""
        self._suspects[engine_id] = request_id

    def take_turn(self) -> str | None:
        """Choose the suspect that the next step computes alone, by our name; None if none can run."""
        able = (name for name in self._suspects if self.can_run(self.requests[name]))
        self._turn = next(able, None)
        return None if self._turn is None else self._suspects[self._turn]

    def is_stalled(self, request: Request) -> bool:
        """Whether a receiver of what a request makes does not keep up."""
        return any(stalled() for stalled in self._stalled.get(request.request_id, ()))

    def can_run(self, request: Request) -> bool:
        """Whether what a request needs is there, and its receivers keep up."""
        return not self.is_stalled(request)

    def may_run(self, request: Request) -> bool:
        """Whether a request can be worked on now, if there is room for it."""
        name = request.request_id
        in_turn = name not in self._suspects if self._turn is None else name == self._turn
        return in_turn and self.can_run(request)

    @property
    def has_ready(self) -> bool:
        """A step would compute something, or the worker must hear of an ended request."""
        if self.finished_req_ids or self.has_failures:
            return True
        return any(self.may_run(request) for request in self.requests.values())

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step, and count what is in it."""
        if self._make_room():
            self._empty_steps = 0
        elif self._empty_steps > MAX_EMPTY_STEPS:
            self._fail_unschedulable()
        self._passed_over = self.out_of_turn()
        could = any(self.may_run(request) for request in self.requests.values())
        output = super().schedule(throttle_prefills)
        self._empty_steps = self._empty_steps + 1 if could and not output.num_scheduled_tokens else 0
        if output.num_scheduled_tokens:
            self.batch_sizes.observe(len(output.num_scheduled_tokens))
        if self._turn is not None and self.requests[self._turn].num_output_tokens >= TRIAL_TOKENS:
            del self._suspects[self._turn]
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
        waiting = sorted(each for each in self.waiting if self.may_run(each))
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

    def may_displace(self, request: Request) -> bool:
        """Whether others may be preempted for a request."""
        return self.may_run(request)

    def _make_room(self) -> bool:
        """Preempt a request for one that could run; returns whether there was one to preempt.

        A stalled request yields as soon as places are short.  One whose input is missing may have it in a
        moment, so it yields only if nothing else can be computed; and one that could run only if it holds
        what another one needs, as two videos can that fill the encoder cache together.
        """
        full = len(self.running) >= self.max_num_active_reqs
        if not (full or self._empty_steps):
            return False
        if not any(map(self.may_displace, self.requests.values() if self._empty_steps else self.waiting)):
            return False
        able = [request for request in self.running if self.may_run(request)]
        victims = [request for request in self.running if self.is_stalled(request)]
        if not victims and (self._empty_steps or not able):
            victims = [request for request in self.running if request not in able]
        if not victims and self._empty_steps and len(able) > 1:
            victims = able
        if not victims:
            return False
        victim = max(victims, key=lambda request: (request.priority, request.arrival_time))
        self.running.remove(victim)
        self._preempt_request(victim, time.monotonic())
        return True

    def _fail_unschedulable(self) -> None:
        """Fail a request that could run, but for which the engine has no room even alone."""
        self._empty_steps = 0
        for request in [*self.running, *self.waiting]:
            if self.may_run(request):
                self.prepare(request.request_id, partial(_refuse, request))
                return

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._stalled.pop(request.request_id, None)
        self._suspects.pop(request.request_id, None)
        if request.request_id == self._turn:
            self._turn = None
        return super()._free_request(request, *args, **kwargs)

    def collect(self, stage: StageName) -> Iterator[Metric]:
        """What the scheduler tells Prometheus; asked by another thread."""
        labels = {"stage": stage}
        yield histogram(
            "omnirelay_stage_batch_requests",
            "Requests in an engine step that computed something.",
            [(labels, self.batch_sizes)],
        )
        if self.kv_cache_config.kv_cache_groups:
            yield gauge(
                "omnirelay_kv_cache_usage_ratio",
                "Share of the KV cache in use, from 0 to 1; not of token2wav.",
                [(labels, self.get_kv_cache_usage())],
            )
            yield counter(
                "omnirelay_preemptions_total",
                "Requests that lost their KV blocks and were computed again; not of token2wav.",
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


def _refuse(request: Request) -> None:
    """Raise StageFailedError: nothing of the request can be computed."""
    raise StageFailedError(
        f"the engine has no room for the request: {request.num_tokens} tokens, of which "
        f"{request.num_computed_tokens} are computed"
    )
