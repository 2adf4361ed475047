"""The interface between the stage loop and a stage's service."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from prometheus_client.core import Metric

from omnirelay.errors import OmniRelayError, StageFailedError
from shared.messages import StageLimits, StageLoad, StageName
from shared.tracing.stage import StageTraces

M = TypeVar("M")
log = logging.getLogger(__name__)


class Failures(dict[str, OmniRelayError]):
    """The requests that failed in a step, with their errors."""

    @contextmanager
    def only(self, request_id: str) -> Iterator[None]:
        """Run a block on behalf of one request: an exception fails that request alone.

        Not for computation shared by a batch, after whose failure no result is valid.
        """
        try:
            yield
        except OmniRelayError as error:
            self[request_id] = error
        except Exception as error:
            log.exception("request %s failed by an unexpected error", request_id)
            self[request_id] = StageFailedError(f"unexpected error: {error!r}")


class ComputeClock(Protocol):
    """How long a model has computed, see :class:`shared.vllm.model_time.ModelTime`."""

    @property
    def seconds(self) -> float:
        """The time so far."""


class StageService(ABC, Generic[M]):
    """What a stage does; :class:`shared.stage.loop.StageLoop` decides when.

    Attributes:
        wake_fd: An eventfd written to when :attr:`ready` may have become true without a message; None if
            that never happens.
        model_time: How long its model has computed.
        traces: Spans of its requests; the service reports phases and completion, the loop the rest.
    """

    name: StageName
    limits: StageLimits
    wake_fd: int | None = None
    model_time: ComputeClock
    traces: StageTraces

    @property
    def wake_at(self) -> float:
        """When :attr:`ready` becomes true without a message, in seconds of ``time.monotonic``.

        Infinite if that is not known to happen.
        """
        return math.inf

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether a step would do something."""

    @abstractmethod
    def accept(self, message: M) -> None:
        """Take a message.

        Raises:
            MessageError: It is rejected.
            RequestError: It is valid, but its request cannot be served.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Drop all state of a request, if there is any."""

    @abstractmethod
    def take_turn(self) -> str | None:
        """Choose the request that the next step computes alone; None where it computes all that are ready."""

    @abstractmethod
    def step(self) -> dict[str, OmniRelayError]:
        """Compute one step and send its results; returns the requests that failed in it."""

    @abstractmethod
    def load(self) -> StageLoad:
        """The present load."""

    @abstractmethod
    def active_requests(self) -> list[str]:
        """All active requests."""

    def holds(self, request_id: str) -> bool:
        """Whether a request is active."""
        return request_id in self.active_requests()

    def close(self) -> None:
        """End whatever would outlive the process."""

    def collect(self) -> Iterator[Metric]:
        """The service's metrics; called by another thread at any time."""
        yield from ()
