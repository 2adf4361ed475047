"""Kill -9 of each stage while it speaks: the answer must come whole, and be the same.

In half precision a resumed reply, whose tokens are prefilled instead of decoded, may go on otherwise.
"""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from benchmarks.adapters.omnirelay import OmniRelay
from benchmarks.gpu.results import PartResult, Settings
from benchmarks.measure.answer import MeasuredAnswer
from benchmarks.measure.results import Cell, Table, tell
from benchmarks.measure.workload import answer_of
from omnirelay import AsyncClient
from omnirelay.errors import OmniRelayError
from services.families.memory import dtype_of
from shared.checkpoints import read_config
from shared.messages import STAGES

LOOK_S: Final = 0.2
BEGINNING: Final = 12
"""Codec tokens before the first audio, and so before the kill."""
ANSWER_S: Final = 180.0
"""A stage on a GPU may take minutes to come back; then the answer goes on."""


def main(settings: Settings) -> PartResult:
    """Kill one stage after the other."""
    return asyncio.run(_measure(settings))


async def _measure(settings: Settings) -> PartResult:
    exact = dtype_of(read_config(Path(settings.model))) == "float32"
    problems: list[str] = []
    changes = {"gateway": {"resume_wait_s": ANSWER_S}}
    async with OmniRelay(Path(settings.model), changes, restart=True) as stack:
        undisturbed = await _ask(stack, settings, None)
        rows: list[list[Cell]] = [["none", undisturbed.done - undisturbed.sent, None]]
        for stage in STAGES:
            tell(f"kill -9 of the {stage}")
            heard = await _ask(stack, settings, stack.pids[stage])
            same = same_until(heard.codec_ids, undisturbed.codec_ids)
            rows.append([stage, heard.done - heard.sent, same])
            problems += [f"after kill -9 of the {stage} {each}" for each in wrong(heard, undisturbed, exact)]
    columns = ["killed", "the answer took, s", "codec tokens until it differs"]
    return PartResult(tables=[Table(title="kill -9", columns=columns, rows=rows)], problems=problems)


def same_until(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many ids are equal, from the first on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))


def wrong(heard: MeasuredAnswer, undisturbed: MeasuredAnswer, exact: bool) -> Iterator[str]:
    """Say what is wrong with an answer: a gap, a repeat, another beginning; ``exact``: or anything else."""
    for name in ("text_ids", "codec_ids"):
        ours, theirs = getattr(heard, name), getattr(undisturbed, name)
        if len(ours) != len(theirs) or (exact and ours != theirs):
            yield f"the {name} are {len(ours)}, of {len(theirs)}, and differ after {same_until(ours, theirs)}"
    if heard.samples != undisturbed.samples:
        yield f"the samples are {heard.samples}, of {undisturbed.samples}"
    if same_until(heard.codec_ids, undisturbed.codec_ids) < BEGINNING:
        yield "the answer begins otherwise"


async def _ask(stack: OmniRelay, settings: Settings, victim: int | None) -> MeasuredAnswer:
    """Ask, and kill a process when the first audio comes.

    Raises:
        OmniRelayError: The answer failed, or did not come in time.
    """
    heard: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    if victim is not None:
        heard.add_done_callback(lambda _: os.kill(victim, signal.SIGKILL))
    try:
        async with asyncio.timeout(ANSWER_S), AsyncClient(stack.address) as client:
            # An answer may have come whole without the stage that was killed before.
            while any(each.state != "ready" for each in (await client.status()).stages):
                await asyncio.sleep(LOOK_S)
        async with asyncio.timeout(ANSWER_S):
            return await stack.answer(answer_of(settings.seconds), 0, heard)
    except TimeoutError as error:
        raise OmniRelayError(f"the answer did not come within {ANSWER_S:.0f} s") from error
