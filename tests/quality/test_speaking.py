"""The trained checkpoint through the running stack: right answers, in words that a listener understands.

That the stack gives what transformers gives says nothing of whether anybody could understand it.
"""

from pathlib import Path

import pytest

from benchmarks.quality.__main__ import Listening, measure
from benchmarks.quality.report import missed, table
from benchmarks.quality.requests import held_out_requests
from checkpoint.training.data.corpus import VOICES

COUNT = 8

pytestmark = [pytest.mark.quality, pytest.mark.timeout(900)]


async def test_answers_are_right_and_intelligible(speaking_checkpoint: Path) -> None:
    requests = held_out_requests(COUNT, list(VOICES))
    found = await measure(speaking_checkpoint, requests, clients=4, listening=Listening())
    print(table({"omnirelay": found}))
    names = {figure.name for figure in found}
    assert {f"word error: streamed, {voice}" for voice in VOICES} <= names
    assert {"right: text", "right: images", "right: speech, trained voices"} <= names
    assert missed(found, few=True) == []
