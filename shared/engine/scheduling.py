"""What the three specialised schedulers have in common: one request's failure is its own."""

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from vllm.exceptions import VLLMClientError
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from shared.errors import OmniRelayError, StageFailedError

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

T = TypeVar("T")
log = logging.getLogger(__name__)


class StageScheduler(Scheduler):
    """vLLM's scheduler, in which an error while preparing one request ends only that request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failures: dict[str, OmniRelayError] = {}

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
            log.warning("request %s failed: %s: %s", engine_id, reason.code, reason, exc_info=known is None)
            self._failures[engine_id] = reason
            self.finish_requests(engine_id, RequestStatus.FINISHED_ERROR)
            return None
