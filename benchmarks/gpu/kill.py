"""Kill -9 of each stage while it speaks: the answer must come, and be the same."""

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.adapters.omnirelay import OmniRelay, request_of
from benchmarks.gpu.results import PartResult, Settings, Table
from benchmarks.measure.output import tell
from benchmarks.measure.workload import answer_of
from omnirelay import AsyncClient, AudioEvent, DoneEvent
from omnirelay.errors import OmniRelayError
from shared.messages import STAGES

ANSWER_S: Final = 180.0
"""A stage on a GPU may take minutes to come back; then the answer goes on."""


class Heard(msgspec.Struct, frozen=True):
    """An answer: its text, its codec tokens, how many samples, how long it took."""

    text: list[int]
    codes: list[int]
    samples: int
    seconds: float


def main(settings: Settings) -> PartResult:
    """Measure."""
    return asyncio.run(_measure(settings))


async def _measure(settings: Settings) -> PartResult:
    """Kill one stage after the other."""
    rows: list[list[Any]] = []
    problems = []
    with tempfile.TemporaryDirectory() as directory:
        async with OmniRelay(Path(settings.model), Path(directory), restart=True) as stack:
            undisturbed = await _listen(stack, settings, None)
            rows.append(["none", undisturbed.seconds, "yes"])
            for stage in STAGES:
                tell(f"kill -9 of the {stage}")
                heard = await _listen(stack, settings, stack.pids[stage])
                same = (heard.text, heard.codes, heard.samples) == (
                    undisturbed.text,
                    undisturbed.codes,
                    undisturbed.samples,
                )
                rows.append([stage, heard.seconds, "yes" if same else "NO"])
                if not same:
                    problems.append(f"after kill -9 of the {stage} the answer is another one")
    columns = ["killed", "the answer took, s", "the same answer"]
    return PartResult(tables=[Table(title="kill -9", columns=columns, rows=rows)], problems=problems)


async def _listen(stack: OmniRelay, settings: Settings, victim: int | None) -> Heard:
    """Ask, and kill a process when the first audio comes.

    Raises:
        OmniRelayError: The answer failed, or did not come in time.
    """
    samples = 0
    started = time.monotonic()
    async with AsyncClient(stack.address) as client:
        try:
            async with asyncio.timeout(ANSWER_S):
                async for event in client.chat(request_of(answer_of(settings.seconds), 0)):
                    if isinstance(event, AudioEvent):
                        samples += event.samples.size
                        if victim is not None:
                            os.kill(victim, signal.SIGKILL)
                            victim = None
                    elif isinstance(event, DoneEvent):
                        took = time.monotonic() - started
                        return Heard(event.text_token_ids, event.codec_token_ids, samples, took)
        except TimeoutError as error:
            raise OmniRelayError(f"the answer did not come within {ANSWER_S:.0f} s") from error
    raise OmniRelayError("the answer had no end")
