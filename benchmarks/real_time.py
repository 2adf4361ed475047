"""Whether speech comes faster than it is heard: ``python -m benchmarks.real_time [DIR] [--cores N]``.

The held-out questions of ``benchmarks.quality``, asked one after the other by one client; N cores in all.
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

import msgspec

from benchmarks.measure.answer import play
from benchmarks.measure.machine import this_machine
from benchmarks.measure.output import tell
from benchmarks.measure.results import percentile
from benchmarks.quality.answers import request, serving
from benchmarks.quality.requests import Asked, held_out_requests
from checkpoint.training.data.corpus import VOICES
from omnirelay import AsyncClient, AudioEvent
from omnirelay.errors import OmniRelayError
from omnirelay.values import SAMPLE_RATE
from shared.config import DEFAULT_CHECKPOINT

RESULT: Final = Path("benchmarks/results/real-time.md")
WARM_UP: Final = 4
"""Answers that are not counted: a new process learns how long its steps take."""


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    """One answer.

    Attributes:
        ttfa_s: Time to first audio.
        audio_s: Length of the speech.
        real_time_factor: From the request to the last audio, for each second of speech.
        silent_s: Without sound, for a player that begins with the first audio.
        delay_s: How long the gateway advised to wait.
        silent_after_delay_s: Without sound, for a player that waits so long.
    """

    ttfa_s: float
    audio_s: float
    real_time_factor: float
    silent_s: float
    delay_s: float
    silent_after_delay_s: float


async def ask(client: AsyncClient, asked: Asked) -> Spoken:
    """Ask, and note when audio comes.

    Raises:
        OmniRelayError: The request failed, or its answer has no speech.
    """
    pieces: list[tuple[float, int]] = []
    delay_s = 0.0
    sent = time.monotonic()
    async for event in client.chat(request(asked)):
        if isinstance(event, AudioEvent):
            delay_s = delay_s or event.start_delay_ms / 1000
            pieces.append((time.monotonic(), event.sample_count))
    if not pieces:
        raise OmniRelayError(f"the answer to {asked.reply!r} has no speech")
    audio_s = sum(samples for _, samples in pieces) / SAMPLE_RATE
    return Spoken(
        ttfa_s=pieces[0][0] - sent,
        audio_s=audio_s,
        real_time_factor=(pieces[-1][0] - sent) / audio_s,
        silent_s=play(pieces)[1],
        delay_s=delay_s,
        silent_after_delay_s=play(pieces, delay_s)[1],
    )


async def measure(model: Path, count: int) -> list[Spoken]:
    """Ask all questions.

    Raises:
        OmniRelayError: The stack could not start, or a request failed.
    """
    requests = held_out_requests(count, list(VOICES))
    with tempfile.TemporaryDirectory() as directory:
        async with serving(model, Path(directory)) as address, AsyncClient(address) as client:
            tell(f"{len(requests)} questions")
            found = [await ask(client, each) for each in (*requests[:WARM_UP], *requests)]
    return found[WARM_UP:]


def table(found: Sequence[Spoken]) -> str:
    """All figures, in Markdown."""
    machine = this_machine()
    cores = len(os.sched_getaffinity(0))
    rows: dict[str, list[float]] = {
        "time to first audio, s": [each.ttfa_s for each in found],
        "length of the speech, s": [each.audio_s for each in found],
        "real-time factor": [each.real_time_factor for each in found],
        "silence, played from the first audio on, s": [each.silent_s for each in found],
        "advised start delay, s": [each.delay_s for each in found],
        "silence, played after the delay, s": [each.silent_after_delay_s for each in found],
    }
    lines = [
        "# Real time: the default checkpoint, one client",
        "",
        f"{machine.cpu}, {cores} of {machine.cores} cores; {len(found)} held-out questions, streamed.",
        "",
        "| | P50 | P90 | most |",
        "|---|--:|--:|--:|",
    ]
    lines += [
        f"| {name} | {percentile(values, 0.5):.2f} | {percentile(values, 0.9):.2f} | {max(values):.2f} |"
        for name, values in rows.items()
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_time", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=DEFAULT_CHECKPOINT, metavar="DIR")
    parser.add_argument("--cores", type=int, metavar="N", help="for all processes (default: all)")
    parser.add_argument("--count", type=int, default=10, help="questions of each kind (default: 10)")
    options = parser.parse_args(arguments)
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    try:
        text = table(asyncio.run(measure(options.model, options.count)))
    except OmniRelayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    RESULT.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
