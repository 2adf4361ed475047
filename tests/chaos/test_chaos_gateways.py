"""Two gateways with the same stages; the loss of one is in ``tests/stack/test_gateways.py``."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cells import Campaign, Cell
from tests.support.restarting import RestartingStack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

SEED = 6


@pytest.fixture(scope="module")
def shared(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    with RestartingStack(tiny_checkpoint, tmp_path_factory.mktemp("gateways"), gateways=2) as stack:
        yield Campaign(stack, random.Random(SEED))


@pytest.mark.parametrize(
    "cell",
    [
        Cell("thinker", "segfault", "talking"),
        Cell("talker", "poison", "talking"),
        Cell("talker", "segfault", "talking"),
        Cell("token2wav", "poison", "synthesizing"),
    ],
    ids=str,
)
def test_a_request_that_ends_engines_is_refused_and_none_of_the_other_gateway(
    shared: Campaign, cell: Cell
) -> None:
    """Both gateways try their suspects on the only replica of the stage."""
    outcome = shared.run(cell)
    print(outcome)
    assert outcome.faults == []
