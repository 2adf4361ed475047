"""Time to first audio, and throughput with more and more clients, through the whole stack."""

import asyncio
import time
from pathlib import Path
from typing import Final

from benchmarks.adapters.omnirelay import OmniRelay
from benchmarks.gpu.results import PartResult, Settings
from benchmarks.measure.load import CONCURRENCY, Load, run_load
from benchmarks.measure.machine import this_machine
from benchmarks.measure.results import RunResult, Table, tell
from benchmarks.measure.workload import answer_of
from benchmarks.report import tables
from shared.real_time import set_realtime_priority

TIME_S: Final = 420.0
"""No load begins later: the part must end within its time."""
ROUNDS: Final = 2
"""Requests of each client."""


def main(settings: Settings) -> PartResult:
    """Measure one load after the other, on one stack."""
    # The clients are here.  Theirs would be another machine, so they do not wait for servers that compute.
    set_realtime_priority()
    return asyncio.run(_measure(settings))


async def _measure(settings: Settings) -> PartResult:
    began, first = time.monotonic(), 0
    loads: list[Load] = []
    problems = []
    workload = answer_of(settings.seconds)
    async with OmniRelay(Path(settings.model)) as stack:
        ready_s = time.monotonic() - began
        for number, clients in enumerate((1, *settings.clients)):
            if time.monotonic() - began > TIME_S:
                problems.append(f"{clients} clients were not measured: {TIME_S:.0f} s had passed")
                continue
            tell(f"{clients} clients")
            # Prompts of their own, so that the prefix cache helps nobody.
            indices = range(first, first := first + ROUNDS * clients)
            load, answers = await run_load(stack, workload, indices, clients, scenario=CONCURRENCY)
            wrong = sum(len(each.codec_ids) != workload.codec_tokens for each in answers)
            if wrong:
                problems.append(f"{clients} clients: {wrong} answers have another length than was asked for")
            # The first one is a warm-up.
            if number:
                loads.append(load)
    result = RunResult(checkpoint=settings.checkpoint, parameters=0.0, machine=this_machine(), loads=loads)
    start = Table(title="Stack", columns=["answers, s", "ready after, s"], rows=[[workload.seconds, ready_s]])
    return PartResult(tables=[start, *tables(result)], problems=problems)
