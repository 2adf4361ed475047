"""A few cells of the matrix, one after the other, on one stack; ``make chaos`` runs them all."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cells import Campaign, Cell
from tests.support.restarting import RestartingStack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

SEED = 6
CELLS = [
    Cell("thinker", "memory", "thinking"),
    Cell("talker", "kill", "talking"),
    Cell("token2wav", "exit", "synthesizing"),
    Cell("talker", "freeze", "queued"),
    Cell("thinker", "garbage", "talking"),
    Cell("token2wav", "hang", "talking"),
    Cell("thinker", "poison", "talking"),
    Cell("gateway", "kill", "queued"),
    Cell("gateway", "freeze", "thinking"),
    Cell("gateway", "stop", "talking"),
    Cell("gateway", "cut", "synthesizing"),
]
"""Each fault, process and state, with ``test_chaos_gateways.py``; SIGTERM to stages is in ``tests/stack``."""


@pytest.fixture(scope="module")
def campaign(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    with RestartingStack(tiny_checkpoint, tmp_path_factory.mktemp("chaos")) as stack:
        yield Campaign(stack, random.Random(SEED))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_eight_streams_end_as_if_nothing_had_happened_and_nothing_is_left(
    campaign: Campaign, cell: Cell
) -> None:
    outcome = campaign.run(cell)
    print(outcome)
    assert outcome.faults == []
