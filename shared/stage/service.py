"""What every stage's service can do; the stage loop needs nothing else of it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from prometheus_client.core import Metric

from omnirelay.errors import OmniRelayError, StageFailedError
from shared.messages import StageLimits, StageLoad, StageName
from shared.tracing.stage import StageTraces

M_contra = TypeVar("M_contra", contravariant=True)
log = logging.getLogger(__name__)


class Failures(dict[str, OmniRelayError]):
    """The requests that failed in a step, with the reason of each."""

    @contextmanager
    def only(self, request_id: str) -> Iterator[None]:
        """Do something for one request alone: whatever is raised ends that request, and no other.

        Not for what the engine computes for all of them: an error there leaves nothing to be believed.
        """
        try:
            yield
        except OmniRelayError as error:
            self[request_id] = error
        except Exception as error:
            log.exception("request %s failed by an error that nobody expected", request_id)
            self[request_id] = StageFailedError(f"an error that nobody expected: {error!r}")


class ComputeClock(Protocol):
    """How long a model has computed, see :class:`shared.vllm.model_time.ModelTime`."""

    @property
    def seconds(self) -> float:
        """Give the time so far."""
        ...


class StageService(Protocol[M_contra]):
    """What a stage does; :class:`shared.stage.loop.StageLoop` decides when.

    Attributes:
        name: The stage.
        limits: What its checkpoint and engine allow.
        wake_fd: An eventfd that is written to when :attr:`ready` may have become true other than by a
            message; none if it never does.
        traces: What is told of its requests; the service says what it does of them, and when one is done,
            the loop when one fails or is aborted.
    """

    name: StageName
    limits: StageLimits
    wake_fd: int | None
    traces: StageTraces

    @property
    def ready(self) -> bool:
        """A step would do something."""

    @property
    def model_time(self) -> ComputeClock:
        """How long its model has computed."""
        ...

    def accept(self, message: M_contra) -> None:
        """Take a message.

        Raises:
            MessageError: It is refused.
            RequestError: It is understood, and its request cannot be served.
        """

    def abort(self, request_id: str) -> None:
        """Drop everything of a request, if it is here."""

    def step(self) -> dict[str, OmniRelayError]:
        """Compute one step and send what came out.

        Returns:
            Requests that failed in it, with the reason.
        """

    def load(self) -> StageLoad:
        """What is held now."""

    def holds(self, request_id: str) -> bool:
        """Whether a request is in work."""

    def active_requests(self) -> list[str]:
        """All requests in work."""

    def close(self) -> None:
        """End whatever would outlive the process."""

    def collect(self) -> Iterator[Metric]:
        """What the service tells Prometheus; asked by another thread, at any time."""
