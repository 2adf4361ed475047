"""What the harness asks of a server."""

import asyncio
from typing import Protocol, Self

from benchmarks.measure.answer import MeasuredAnswer
from benchmarks.measure.counters import Counters
from benchmarks.measure.workload import Workload


class Adapter(Protocol):
    """A server, started for as long as the block of ``async with`` lasts.

    Attributes:
        name: For the report.
        pids: Its processes, by name.
    """

    name: str
    pids: dict[str, int]

    async def __aenter__(self) -> Self:
        """Start it, and wait until it answers."""

    async def __aexit__(self, *_: object) -> None:
        """Stop it."""

    async def answer(
        self, workload: Workload, index: int, heard: asyncio.Future[float] | None = None
    ) -> MeasuredAnswer:
        """Send a request and wait for the whole answer; any number may be under way at once.

        Args:
            workload: Lengths of the prompt and the answer; the answer is greedy.
            index: Which prompt of the workload.
            heard: Gets the time to first audio, in seconds, as soon as it is known.
        """

    async def counters(self) -> Counters:
        """What its processes have counted since they started."""
