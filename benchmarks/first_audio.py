"""The way to the first audio: ``python -m benchmarks.first_audio [--size SIZE]``.

One client asks for ten seconds of speech, again and again.  Traces say where the time until its first audio
went; the parts follow each other, so their sum is the time to first audio.  Beside it stands the models' own
time in an answer that ends where the first audio can be made: what the stages add is the difference.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.adapters.omnirelay import OmniRelay
from benchmarks.measure.answer import MeasuredAnswer
from benchmarks.measure.checkpoints import SIZES, ensure
from benchmarks.measure.load import run_load
from benchmarks.measure.machine import this_machine
from benchmarks.measure.otlp import Collector, Trace
from benchmarks.measure.output import tell
from benchmarks.measure.results import percentile
from benchmarks.measure.workload import PROMPT_TOKENS, Workload, answer_of
from omnirelay.errors import OmniRelayError
from shared.messages import STAGES

SECONDS: Final = 10.0
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
TRACES_TO: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"


def parts_of(trace: Trace, sent_ns: int, heard_ns: int) -> list[float]:
    """Return the seconds of each of :data:`PARTS`.

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


async def ask(
    server: OmniRelay, collector: Collector, workload: Workload, indices: range
) -> tuple[list[list[float]], float]:
    """Ask one after the other.

    Returns:
        The parts of each answer, and the models' seconds for each.

    Raises:
        OmniRelayError: A request failed.
        TimeoutError: A trace did not come.
    """
    since = time.time_ns()
    load, answers = await run_load(server, workload, indices, 1, scenario="first-audio")
    model_s = sum(stage.seconds["model"] for stage in load.stages) / len(answers)
    spans = collector.spans(
        lambda spans: sum(span.name == "request" and span.begin > since for span in spans) == len(answers)
    )
    roots = sorted((span.begin, span.trace_id) for span in spans if span.name == "request")
    traces = [collector.trace(trace_id, *STAGES) for begin, trace_id in roots if begin > since]
    return [parts_of(trace, *_times(answer)) for trace, answer in zip(traces, answers, strict=True)], model_s


def _times(answer: MeasuredAnswer) -> tuple[int, int]:
    """When it was sent, and heard, on the clock of the traces."""
    offset = time.time_ns() - time.monotonic_ns()
    heard = next(at for at, samples in answer.pieces if samples)
    return offset + int(1e9 * answer.sent), offset + int(1e9 * heard)


def table(size: str, parts: Sequence[Sequence[float]], model_s: float) -> str:
    """All figures, in Markdown."""
    machine = this_machine()
    medians = [percentile(values, 0.5) for values in zip(*parts, strict=True)]
    total = percentile([sum(each) for each in parts], 0.5)
    rows = zip((*PARTS, "first audio", "the models alone"), (*medians, total, model_s), strict=True)
    return "\n".join(
        [
            f"# {size}: the way to the first audio, one client",
            "",
            f"{machine.cpu}, {machine.cores} cores; medians of {len(parts)} answers of {SECONDS:g} s.",
            "",
            "| | ms | of the models alone |",
            "|---|--:|--:|",
            *(f"| {name} | {1000 * seconds:.1f} | {seconds / model_s:.2f} |" for name, seconds in rows),
            "",
        ]
    )


async def measure(size: str, repeats: int) -> str:
    """Measure; gives the table.

    Raises:
        OmniRelayError: The checkpoint could not be made, or a request failed.
        TimeoutError: A trace did not come.
    """
    model = await ensure(size)
    with Collector() as collector, tempfile.TemporaryDirectory() as directory:
        os.environ[TRACES_TO] = collector.url
        async with OmniRelay(model, Path(directory)) as server:
            await ask(server, collector, answer_of(SECONDS), range(2))
            _, model_s = await ask(server, collector, LEAST, range(100, 100 + repeats))
            tell(f"the models alone: {model_s:.3f} s")
            parts, _ = await ask(server, collector, answer_of(SECONDS), range(200, 200 + repeats))
    return table(size, parts, model_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_audio", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small", help="checkpoint (default: small)")
    parser.add_argument("--repeats", type=int, default=7, help="answers (default: 7)")
    options = parser.parse_args(arguments)
    try:
        text = asyncio.run(measure(options.size, options.repeats))
    except (OmniRelayError, TimeoutError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    Path("benchmarks/results", f"{options.size}-first-audio.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
