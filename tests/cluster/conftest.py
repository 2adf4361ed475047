"""One Ray cluster for all tests of this part, and one stack with speech."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import SLOT, RayNodes
from tests.cluster.stack import ClusterStack
from tests.support.children import Folders


@pytest.fixture(scope="session")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as running:
        yield running


@pytest.fixture(scope="module")
def stack(nodes: RayNodes, tiny_checkpoint: Path, tmp_path_factory: Folders) -> Iterator[ClusterStack]:
    """Gateway and token2wav are on nodes that can be killed, and not on the same."""
    alone = {"resources": {SLOT: 1.0}}
    with ClusterStack(
        nodes,
        tiny_checkpoint,
        tmp_path_factory.mktemp("cluster"),
        cluster={"gateway": alone, "token2wav": alone},
    ) as running:
        yield running
