"""The trained checkpoint through the running stack: right answers, in words that a listener understands.

That the stack gives what transformers gives says nothing of whether anybody could understand it.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.quality.__main__ import Listening, measure, missed, table
from benchmarks.quality.answers import held_out_requests
from labs.training.data.corpus import VOICES

COUNT = 8
# What docs/training.md says.  It misses the bound of `make quality` here,
# which is no news to CI; that it speaks worse than it did is.
WORD_ERROR = {"word error: words in any order read aloud": 0.46}

pytestmark = [pytest.mark.quality, pytest.mark.timeout(1200)]


async def test_answers_are_right_and_intelligible(speaking_checkpoint: Path) -> None:
    requests = held_out_requests(COUNT)
    found = await measure(speaking_checkpoint, requests, clients=4, listening=Listening())
    print(table(found))
    names = {figure.name for figure in found}
    assert {f"word error: streamed, {voice}" for voice in VOICES} <= names
    assert names >= WORD_ERROR.keys()
    known = [replace(each, most=WORD_ERROR.get(each.name, each.most)) for each in found]
    assert missed(known, few=True) == []
