"""The rule at work: a thinker alone, on a real Ray cluster."""

from pathlib import Path

import pytest

from omnirelay import Client, SamplingOverrides
from ops.cluster.members import Member
from ops.cluster.plan import actor_name
from tests.cluster.nodes import RayNodes
from tests.cluster.stack import COMMAND_S, ClusterStack
from tests.support.children import Patch
from tests.support.processes import wait_until
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def write(client: Client, number: int) -> None:
    """A long text."""
    sampling = SamplingOverrides(max_tokens=400, min_tokens=400)
    client.chat("Tell me all.", speech=False, seed=number, text_sampling=sampling).result()


async def test_the_rule_does_not_undo_what_a_command_has_done_meanwhile(monkeypatch: Patch) -> None:
    from ops.cluster import controller  # noqa: PLC0415 - only this part needs Ray

    there = ["talker-1"]
    monkeypatch.setattr(controller, "actors", lambda _: there)
    monkeypatch.setattr(controller.Controller, "_create", lambda _, *name: there.append(actor_name(*name)))
    settings = "{model: m, cluster: {scale_up_after_s: 1.e-9, talker: {max_replicas: 6}}}"
    one = controller.Controller(settings, {}, gpus_there=False)
    one._tending.cancel()
    before = [Member("talker-1", "talker", False, None, ready=True, requests=99)]
    one._scale_by_rule(before, {})
    await one.scale({"talker": 4})
    one._scale_by_rule(before, {})
    assert (there, one._draining) == (["talker-1", "talker-2", "talker-3", "talker-4"], {})


def test_a_busy_stage_gets_a_replica_and_gives_it_back(
    nodes: RayNodes, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with ClusterStack(
        nodes,
        tiny_checkpoint,
        tmp_path,
        text_only=True,
        stages={"thinker": {"engine": {"max_num_seqs": 2}}},
        cluster={"scale_up_after_s": 3.0, "scale_down_after_s": 5.0, "thinker": {"max_replicas": 2}},
    ) as stack:
        with Traffic(stack.address, [write], clients=4):
            wait_until(lambda: len(stack.processes()) == 3, "there are two thinkers", COMMAND_S)
            stack.wait_until_ready()
        wait_until(lambda: len(stack.processes()) == 2, "there is one again", COMMAND_S)
        with Client(stack.address) as client:
            write(client, 0)
