"""Sends the prompts of a batch, so many at a time that the stages always have the next one."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

from omnirelay import AsyncClient, GenerateRequest
from omnirelay.client.types import ChatResult
from omnirelay.errors import (
    BusyError,
    CancelledRequestError,
    RequestError,
    StageUnavailableError,
    StoppingError,
)
from ops.batch.prompts import BatchJob
from ops.batch.results import ResultFolder
from shared.config import Config
from shared.engine_defaults import CPU_BATCH, GPU_BATCH

STAGE_WAIT_S: Final = 120.0
"""How long a prompt waits for a stage that is not there."""
RETRY_S: Final = 1.0
log = logging.getLogger(__name__)


class Tally:
    """How far a batch is.

    Attributes:
        total: Prompts of the input.
        resumed: Those that an earlier run answered.
        answered: Those that this one did.
        failed: Those that have no answer.
    """

    def __init__(self, total: int) -> None:
        self.total: Final = total
        self.resumed = 0
        self.answered = 0
        self.failed = 0
        self._began = time.monotonic()

    @property
    def summary(self) -> str:
        """One line."""
        more = f", {self.resumed:,} of them by an earlier run" if self.resumed else ""
        done = self.resumed + self.answered
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{done:,} of {self.total:,} answered{more}{failed}"

    @property
    def estimate(self) -> str:
        """The same, with the rate and the time that is left once they are known."""
        tried = self.answered + self.failed
        elapsed = time.monotonic() - self._began
        if not self.answered:
            return self.summary
        left = (self.total - self.resumed - tried) * elapsed / tried
        return f"{self.summary}; {tried / elapsed:.1f} a second, about {_duration(left)} left"


async def answer_jobs(
    client: AsyncClient,
    jobs: Iterator[BatchJob],
    request_of: Callable[[BatchJob], GenerateRequest],
    results: ResultFolder,
    tally: Tally,
) -> None:
    """Answer jobs that have no result yet, one after the other.

    Raises:
        OmniRelayError: The gateway is gone or stopping, the results cannot be written, or the input cannot be
            read: what has a result keeps it.
    """
    for job in jobs:
        if results.has(job):
            tally.resumed += 1
            continue
        try:
            answer = await patient_answer(client, request_of(job))
        except (StoppingError, CancelledRequestError):
            # Not asked for: the gateway ends, so the prompts that are left would fail too.
            raise
        except RequestError as error:
            log.debug("%s failed: %s", job.id, error.for_log)
            results.add_failure(job, error)
            tally.failed += 1
        else:
            results.add(job, answer)
            tally.answered += 1


async def patient_answer(client: AsyncClient, request: GenerateRequest) -> ChatResult:
    """Return the answer to a request; wait while the gateway is busy, or starts a stage.

    Raises:
        OmniRelayError: The request failed, or the gateway is gone or stopping.
    """
    late = time.monotonic() + STAGE_WAIT_S
    while True:
        try:
            return await client.chat(request).result()
        except StoppingError:
            raise
        except BusyError as error:
            await asyncio.sleep(error.retry_after_ms / 1000)
        except StageUnavailableError:
            # A stage that starts, or is started again, is waited for; one that stays away is not.
            if time.monotonic() > late:
                raise
            await asyncio.sleep(RETRY_S)


def concurrency_of(config: Config) -> int:
    """Twice the active requests, so that the stages never wait for the next one."""
    limits = config.gateway.limits
    most = (limits.max_active or CPU_BATCH) + limits.max_queued
    return min(2 * (limits.max_active or GPU_BATCH), most, limits.max_queued_per_client)


def _duration(seconds: float) -> str:
    """A time, for people: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
