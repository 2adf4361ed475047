"""A few cells of the matrix, one after the other, on two stacks; ``make chaos`` runs them all."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cells import Campaign, Cell
from tests.support.restarting import RestartingStack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

SEED = 6
ONE_GATEWAY = [
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
"""Each fault, process and state, with those below; SIGTERM to stages is in ``tests/stack``."""
TWO_GATEWAYS = [
    Cell("thinker", "segfault", "talking"),
    Cell("talker", "poison", "talking"),
    Cell("talker", "segfault", "talking"),
    Cell("token2wav", "poison", "synthesizing"),
]
"""Both try suspects on the only replica of a stage; a gateway is lost in ``tests/stack/test_gateways.py``."""


@pytest.fixture(scope="module")
def campaign(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Campaign]:
    """On a stack with so many gateways."""
    folder = tmp_path_factory.mktemp("chaos")
    with RestartingStack(tiny_checkpoint, folder, gateways=request.param) as stack:
        yield Campaign(stack, random.Random(SEED))


@pytest.mark.parametrize(
    ("campaign", "cell"),
    [*((1, cell) for cell in ONE_GATEWAY), *((2, cell) for cell in TWO_GATEWAYS)],
    indirect=["campaign"],
    ids=str,
    scope="module",
)
def test_eight_streams_end_as_if_nothing_had_happened_and_nothing_is_left(
    campaign: Campaign, cell: Cell
) -> None:
    outcome = campaign.run(cell)
    print(outcome)
    assert outcome.faults == []
