"""Loads: clients that ask at once, and what came of it."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from benchmarks.adapters.base import Adapter
from benchmarks.measure.answer import MeasuredAnswer, Timing, timing
from benchmarks.measure.counters import Stage, stages_of
from benchmarks.measure.machine import Cpu, forget_peak, peak_memory
from benchmarks.measure.workload import Workload

CONCURRENCY: Final = "concurrency"
FEWEST: Final = 3
"""Requests of a load."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One load.

    Attributes:
        adapter: Who served it.
        scenario: What it is part of.
        clients: How many asked at once.
        repeat: Which time it was.
        workload: What they asked.
        wall_s: From the first request to the last answer.
        answers: Figures of each answer.
        peak_memory: Largest resident set of each process, in bytes.
        cpu_s: Processor seconds of each process.
        others_cpu: Share of the machine's cores that went to processes of others, from 0 to 1.
        stages: OmniRelay's stages.
    """

    adapter: str
    scenario: str
    clients: int
    repeat: int
    workload: Workload
    wall_s: float
    answers: list[Timing]
    peak_memory: dict[str, int]
    cpu_s: dict[str, float]
    others_cpu: float
    stages: list[Stage]

    @property
    def requests_per_s(self) -> float:
        """Answers each second."""
        return len(self.answers) / self.wall_s


async def run_load(
    adapter: Adapter,
    workload: Workload,
    indices: Sequence[int],
    clients: int,
    *,
    scenario: str,
    repeat: int = 0,
) -> tuple[Load, list[MeasuredAnswer]]:
    """Let clients ask, each its next request when it has the answer to the one before.

    Args:
        adapter: Whom.
        workload: What.
        indices: The prompts, shared out among the clients.
        clients: How many.
        scenario: What it is part of.
        repeat: Which time it is.

    Returns:
        The figures, and the answers themselves in the order of ``indices``.
    """
    waiting = list(reversed(indices))
    answers: dict[int, MeasuredAnswer] = {}

    async def ask() -> None:
        while waiting:
            index = waiting.pop()
            answers[index] = await adapter.answer(workload, index)

    for pid in adapter.pids.values():
        forget_peak(pid)
    before = await adapter.counters()
    cpu = Cpu(adapter.pids)
    started = time.monotonic()
    asking = [asyncio.create_task(ask()) for _ in range(clients)]
    try:
        await asyncio.gather(*asking)
    finally:
        for each in asking:
            each.cancel()
    wall_s = time.monotonic() - started
    others_cpu = cpu.others()
    counted = (await adapter.counters()).since(before)
    load = Load(
        adapter=adapter.name,
        scenario=scenario,
        clients=clients,
        repeat=repeat,
        workload=workload,
        wall_s=wall_s,
        answers=[timing(answers[index]) for index in indices],
        peak_memory={name: peak_memory(pid) for name, pid in adapter.pids.items()},
        cpu_s=cpu.spent(),
        others_cpu=others_cpu,
        stages=stages_of(counted),
    )
    return load, [answers[index] for index in indices]
