"""What listeners hear: the playback clock, the default checkpoint, the way to the first audio."""

import asyncio
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain, count
from pathlib import Path
from typing import Any, Final
from unittest import mock

from benchmarks.adapters.omnirelay import OmniRelay
from benchmarks.measure.answer import MeasuredAnswer, Timing, timing
from benchmarks.measure.checkpoints import make
from benchmarks.measure.load import run_load
from benchmarks.measure.otlp import Collector, Trace
from benchmarks.measure.results import Measured, tell
from benchmarks.measure.workload import PROMPT_TOKENS, Workload, answer_of
from omnirelay import AsyncClient
from omnirelay.errors import OmniRelayError
from shared.config import DEFAULT_CHECKPOINT
from shared.messages import STAGES

REQUESTS: Final = 48
LENGTHS_S: Final = (3.0, 6.0, 12.0, 20.0)
SHARES: Final = (0.6, 0.7, 0.9)
"""Of the requests a second that most clients at once are answered."""
CLIENTS: Final = (1, 4, 8)
CLOCK: Final[Mapping[str, Any]] = {
    "on": {},
    "off": {"stages": {stage: {"playback_margin_s": 0.0} for stage in ("talker", "token2wav")}},
}
FIRST_CODES: Final = 24
"""Codec tokens that the first chunk is made of: two blocks of the DiT."""
LEAST: Final = Workload(prompt_tokens=PROMPT_TOKENS, text_tokens=FIRST_CODES, codec_tokens=FIRST_CODES)
PARTS: Final = (
    "client to gateway",
    "gateway: checks, prompt, queue",
    "to the thinker's batch",
    "thinker: prefill",
    "rows to the talker's batch",
    "talker: prefill",
    f"{FIRST_CODES} codec tokens, and to token2wav",
    "token2wav: DiT and vocoder",
    "to the client",
)


def heard(name: str, answers: Iterable[Timing]) -> Measured:
    """What the listeners of some answers heard."""
    found = list(answers)
    figures = {
        "first audio, s": [each.ttfa_s for each in found],
        "advised start, s": [each.start_s for each in found],
        "least start, s": [each.least_start_s for each in found],
        "silence, s": [each.stalled_s for each in found],
        "silence after the advised start, s": [each.stalled_after_delay_s for each in found],
        "real-time factor": [each.real_time_factor for each in found],
    }
    whole = sum(each.underruns_after_delay == 0 for each in found)
    return Measured(name, {**figures, "answers without a gap, %": [100 * whole / max(1, len(found))]})


async def playback(model: Path, slower: int) -> list[Measured]:
    """Put the same loads on the stack with and without the playback clock, for speech of different lengths.

    First clients that ask again when they have their answer; then requests that come at random times (a
    Poisson process), whether those before have ended or not.
    """
    rows, capacity = [], 0.0
    for clock, changes in CLOCK.items():
        async with OmniRelay(model, changes, slower=slower) as server:
            await run_load(server, answer_of(1.0), range(4), 4, scenario="warm-up")
            numbers = count(1000)
            for clients in CLIENTS:
                began = time.monotonic()
                answers = await _ask_again(server, numbers, clients)
                rows.append(heard(f"{clients} at once, clock {clock}", answers))
            capacity = capacity or len(answers) / (time.monotonic() - began)
            for share in SHARES:
                tell(f"clock {clock}, {share:.0%} of {capacity:.2f} requests/s")
                answers = await _arrive(server, numbers, share * capacity)
                rows.append(heard(f"{share:.0%}: {share * capacity:.2f}/s, clock {clock}", answers))
    return sorted(rows, key=lambda row: row.name)


async def _ask(server: OmniRelay, numbers: Iterator[int], seconds: float) -> Timing:
    return timing(await server.answer(answer_of(seconds), next(numbers)))


async def _ask_again(server: OmniRelay, numbers: Iterator[int], clients: int) -> list[Timing]:
    """Let clients ask for speech of every length, each again when it has its answer."""

    async def ask(client: int) -> list[Timing]:
        lengths = random.Random(client).sample(LENGTHS_S, len(LENGTHS_S))  # noqa: S311 - nothing secret
        return [await _ask(server, numbers, seconds) for seconds in lengths]

    return list(chain.from_iterable(await asyncio.gather(*map(ask, range(clients)))))


async def _arrive(server: OmniRelay, numbers: Iterator[int], rate: float) -> list[Timing]:
    """Ask at random times, so many requests a second.

    Raises:
        OmniRelayError: A request failed.
    """
    generator = random.Random(1)  # noqa: S311 - nothing secret
    asked: list[asyncio.Task[Timing]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(REQUESTS):
                asked.append(group.create_task(_ask(server, numbers, generator.choice(LENGTHS_S))))
                await asyncio.sleep(generator.expovariate(rate))
    except* OmniRelayError as errors:
        raise OmniRelayError(f"a request failed: {errors.exceptions[0]}") from errors
    return [task.result() for task in asked]


async def real_time(count_of_each: int) -> list[Measured]:
    """Ask the default checkpoint the held-out questions of ``benchmarks.quality``, one after the other."""
    from benchmarks.quality.answers import request  # noqa: PLC0415 - they need what trains checkpoints
    from benchmarks.quality.requests import held_out_requests  # noqa: PLC0415 - as above

    requests = held_out_requests(count_of_each)
    if not (DEFAULT_CHECKPOINT / "config.json").is_file():
        make("speaking", DEFAULT_CHECKPOINT)
    async with OmniRelay(DEFAULT_CHECKPOINT) as server, AsyncClient(server.address) as client:
        # The first four are not counted: a new process learns how long its steps take.
        asked = [*requests[:4], *requests]
        answers = [await server.measured(client.chat(request(each))) for each in asked]
    return [heard("held-out questions", map(timing, answers[4:]))]


async def way_to_first_audio(model: Path, repeats: int) -> list[Measured]:
    """Ask for ten seconds of speech, one answer at a time; traces say where the time to first audio went.

    Beside it stands the models' own time in an answer that ends where the first audio can be made: what the
    stages add is the difference.
    """
    with ExitStack() as tracing:
        collector = tracing.enter_context(Collector())
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        tracing.enter_context(mock.patch.dict(os.environ, endpoint))
        async with OmniRelay(model) as server:
            await _parts(server, collector, answer_of(10.0), range(2))
            _, model_s = await _parts(server, collector, LEAST, range(100, 100 + repeats))
            parts, _ = await _parts(server, collector, answer_of(10.0), range(200, 200 + repeats))
    columns = {name: list(seconds) for name, seconds in zip(PARTS, zip(*parts, strict=True), strict=True)}
    columns |= {"first audio": list(map(sum, parts)), "the models alone": [model_s]}
    return [Measured(name, {"s": seconds}) for name, seconds in columns.items()]


async def _parts(
    server: OmniRelay, collector: Collector, workload: Workload, indices: range
) -> tuple[list[list[float]], float]:
    """Ask one after the other; gives the parts of each answer, and the models' seconds for each."""
    since = time.time_ns()
    load, answers = await run_load(server, workload, indices, 1, scenario="first-audio")
    model_s = sum(stage.seconds["model"] for stage in load.stages) / len(answers)
    spans = collector.spans(
        lambda spans: sum(span.name == "request" and span.begin > since for span in spans) == len(answers)
    )
    roots = sorted((span.begin, span.trace_id) for span in spans if span.name == "request")
    traces = [collector.trace(trace_id, *STAGES) for begin, trace_id in roots if begin > since]
    return [parts_of(trace, *_times(answer)) for trace, answer in zip(traces, answers, strict=True)], model_s


def parts_of(trace: Trace, sent_ns: int, heard_ns: int) -> list[float]:
    """Return the seconds of each of :data:`PARTS`, which follow each other.

    Args:
        trace: Of a request with speech.
        sent_ns: When its client sent it, in nanoseconds since the epoch.
        heard_ns: When its client had the first audio.
    """
    below = {stage: {span.name: span for span in reversed(trace.below(trace[stage]))} for stage in STAGES}
    prompt, rows = below["thinker"]["prefill"], below["talker"]["prefill"]
    (queue,) = [span for span in trace.below(trace.root) if span.name == "queue"]
    ends = (
        *(trace.root.begin, queue.end, prompt.begin, prompt.end, rows.begin, rows.end),
        *(below["token2wav"]["wait_codes"].end, below["token2wav"]["chunk"].end, heard_ns),
    )
    return [(end - begin) / 1e9 for begin, end in zip((sent_ns, *ends), ends, strict=False)]


def _times(answer: MeasuredAnswer) -> tuple[int, int]:
    """When it was sent, and heard, on the clock of the traces."""
    offset = time.time_ns() - time.monotonic_ns()
    first = next(at for at, samples in answer.pieces if samples)
    return offset + int(1e9 * answer.sent), offset + int(1e9 * first)
