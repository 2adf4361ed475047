"""What the three specialised schedulers have in common: one request's failure is its own."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from prometheus_client.core import Metric
from vllm.exceptions import VLLMClientError
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from shared.errors import OmniRelayError, StageFailedError
from shared.messages import StageName
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
        scheduled_tokens: Tokens of all steps.
        preemptions: How often a request had to give its KV blocks back.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failures: dict[str, OmniRelayError] = {}
        self.batch_sizes = Distribution(BATCH_BUCKETS)
        self.scheduled_tokens = 0
        self.preemptions = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step, and count what is in it."""
        output = super().schedule(throttle_prefills)
        if output.num_scheduled_tokens:
            self.batch_sizes.observe(len(output.num_scheduled_tokens))
            self.scheduled_tokens += output.total_num_scheduled_tokens
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
            log.warning("request %s failed: %s", engine_id, reason.for_log, exc_info=known is None)
            self._failures[engine_id] = reason
            self.finish_requests(engine_id, RequestStatus.FINISHED_ERROR)
            return None
