"""Time to first audio, and throughput with more and more clients, through the whole stack."""

import asyncio
import time
from pathlib import Path
from typing import Final

from benchmarks.adapters.omnirelay import OmniRelay
from benchmarks.gpu.results import PartResult, Settings
from benchmarks.measure.load import Load, run_load
from benchmarks.measure.results import Cell, Table, percentile, tell
from benchmarks.measure.workload import answer_of
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
            load, answers = await run_load(stack, workload, indices, clients, scenario="gpu")
            wrong = sum(len(each.codec_ids) != workload.codec_tokens for each in answers)
            if wrong:
                problems.append(f"{clients} clients: {wrong} answers have another length than was asked for")
            # The first one is a warm-up.
            if number:
                loads.append(load)
    columns = [
        *("clients", "first audio, s, median", "P95", "completion, s, median"),
        *("requests/s", "seconds of audio a second"),
    ]
    title = f"Answers of {workload.seconds:g} s; ready after {ready_s:.0f} s"
    memory: list[list[Cell]] = [
        [name, max(load.peak_memory[name] for load in loads) / 2**30]
        for name in (loads[0].peak_memory if loads else {})
    ]
    host = Table(title="Most memory of each process, on the host", columns=["process", "GiB"], rows=memory)
    table = Table(title=title, columns=columns, rows=[_row(load) for load in loads])
    return PartResult(tables=[table, host], problems=problems)


def _row(load: Load) -> list[Cell]:
    first = [answer.ttfa_s for answer in load.answers]
    done = [answer.completion_s for answer in load.answers]
    return [
        *(load.clients, percentile(first, 0.5), percentile(first, 0.95), percentile(done, 0.5)),
        *(load.requests_per_s, load.audio_per_s),
    ]
