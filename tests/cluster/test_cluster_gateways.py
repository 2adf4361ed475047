"""Two gateways on a real Ray cluster: one is lost, and its clients go on at the other."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from omnirelay import Client
from tests.chaos.streams import Heard, Stream, check_heard, heard_of, speaks
from tests.cluster.nodes import SLOT, RayNodes
from tests.cluster.stack import STREAMS, ClusterStack, Process
from tests.support.children import Folders
from tests.support.processes import wait_until
from tests.support.stack import addresses_of_several

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ANSWERS_S = 240.0
ONE, TWO = "gateway-1", "gateway-2"


@pytest.fixture(scope="module")
def stack(nodes: RayNodes, tiny_checkpoint: Path, tmp_path_factory: Folders) -> Iterator[ClusterStack]:
    """The gateways are on nodes that can be killed, and not on the same."""
    with ClusterStack(
        nodes,
        tiny_checkpoint,
        tmp_path_factory.mktemp("gateways"),
        gateway={"replicas": 2, "drain_s": 60.0, **addresses_of_several()},
        cluster={"gateway": {"resources": {SLOT: 1.0}}},
    ) as running:
        yield running


def reached(process: Process) -> str:
    return process.clients[0]


@pytest.fixture
def clients(stack: ClusterStack) -> Iterator[list[Client]]:
    """One begins at each gateway, and knows the other."""
    found = stack.wait_until_ready()
    addresses = [reached(found[name]) for name in (ONE, TWO)]
    with Client(addresses) as one, Client(addresses[::-1]) as other:
        yield [one, other]


@pytest.fixture(scope="module")
def undisturbed(stack: ClusterStack) -> list[Heard]:
    with Client(stack.address) as client:
        return heard_of(stack.ask(client))


def ask(clients: list[Client]) -> list[Stream]:
    """Begin the streams, half of them at each gateway, and wait until both speak."""
    streams = [Stream(clients[number % 2], number) for number in range(STREAMS)]
    for half in (streams[::2], streams[1::2]):
        wait_until(partial(speaks, half), "speech comes", ANSWERS_S)
    return streams


def served_by(address: str) -> set[int | None]:
    """The stages that a gateway has as ready."""
    with Client(address) as client:
        return {each.pid for each in client.status().stages if each.state == "ready"}


def stages(found: dict[str, Process]) -> set[int | None]:
    return {each.pid for name, each in found.items() if not name.startswith("gateway")}


def wait_for_all(found: dict[str, Process], gateway: str) -> None:
    wait_until(lambda: served_by(reached(found[gateway])) == stages(found), "it has all stages", ANSWERS_S)


def test_both_are_placed_apart_and_have_all_stages(stack: ClusterStack) -> None:
    found = stack.wait_until_ready()
    assert found[ONE].host != found[TWO].host
    assert reached(found[ONE]) == stack.address
    for name in (ONE, TWO):
        wait_for_all(found, name)
    said = stack.run("status").splitlines()
    for name in (ONE, TWO):
        assert f"{name}: {', '.join(found[name].clients)}" in said


def test_a_killed_gateway_comes_back_and_its_streams_go_on_at_the_other(
    stack: ClusterStack, undisturbed: list[Heard], clients: list[Client]
) -> None:
    before = stack.processes()
    streams = ask(clients)
    psutil.Process(before[TWO].pid).kill()
    check_heard(streams, undisturbed)
    assert clients[1]._client.address == stack.address
    after = stack.wait_until_ready()
    assert after[TWO].restarts == before[TWO].restarts + 1
    assert stages(after) == stages(before)


def test_a_killed_node_with_a_gateway_costs_no_answer(
    stack: ClusterStack, nodes: RayNodes, undisturbed: list[Heard], clients: list[Client]
) -> None:
    before = stack.processes()
    host = before[TWO].host
    assert host is not None
    staying = stages({name: each for name, each in before.items() if each.host != host})
    print(f"{sorted(each.name for each in before.values() if each.host == host)} are killed with their node")
    streams = ask(clients)
    began = time.monotonic()
    nodes.kill(host)
    try:
        check_heard(streams, undisturbed)
        print(f"all answers after {time.monotonic() - began:.1f} s")
        wait_until(lambda: elsewhere(stack, host), "it is elsewhere", ANSWERS_S)
        after = stack.wait_until_ready()
        # No other stage was started again; all of them join it where it is now.
        assert staying <= stages(after)
        wait_for_all(after, TWO)
        with Client(reached(after[TWO])) as client:
            again = [Stream(client, number) for number in range(STREAMS)]
            check_heard(again, undisturbed)
    finally:
        nodes.add()


def elsewhere(stack: ClusterStack, host: str) -> bool:
    found = stack.processes()[TWO]
    return found.ready and found.host != host


def test_gateways_are_scaled_under_streams(
    stack: ClusterStack, undisturbed: list[Heard], clients: list[Client]
) -> None:
    before = stack.processes()
    streams = ask(clients)
    said = stack.run("scale", "gateway=1")
    assert f"gateway: 1 ready\nclients: {', '.join(before[ONE].clients)}" in said
    assert TWO not in stack.processes()
    check_heard(streams, undisturbed)
    said = stack.run("scale", "gateway=2")
    found = stack.wait_until_ready()
    assert ", ".join([*found[ONE].clients, *found[TWO].clients]) in said
    assert stages(found) == stages(before)
    wait_for_all(found, TWO)
    again = ask(clients)
    check_heard(again, undisturbed)
