"""``omnirelay cluster`` on a real Ray cluster of four nodes: placement, scaling, lost and frozen nodes."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from omnirelay import Client
from tests.chaos.load import Load
from tests.chaos.streams import Heard, check_heard, heard_of, speaks
from tests.cluster.nodes import CPUS, RayNodes
from tests.cluster.stack import STREAMS, ClusterStack, folder_of
from tests.support.processes import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ANSWERS_S = 240.0
FENCED_S = 60.0


@pytest.fixture(scope="module")
def undisturbed(stack: ClusterStack) -> list[Heard]:
    """What clients hear when nothing happens."""
    with Client(stack.address) as client:
        return heard_of(stack.ask(client))


@pytest.fixture
def client(stack: ClusterStack) -> Iterator[Client]:
    stack.wait_until_ready()
    with Client(stack.address) as client:
        yield client


def gone(victims: list[psutil.Process]) -> bool:
    """Whether these very processes have ended, whoever has their ids now."""
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in victims)


def away_from(stack: ClusterStack, host: str, names: set[str]) -> bool:
    """Whether these processes are ready on other nodes."""
    found = stack.processes()
    return all(found[name].ready and found[name].host != host for name in names)


def without_gateway(stack: ClusterStack, nodes: RayNodes) -> tuple[str, set[str]]:
    """The node of token2wav, which never is the gateway's; and what runs there."""
    found = stack.processes()
    host = found["token2wav-1"].host
    assert host is not None
    assert nodes.can_be_killed(host)
    assert found["gateway-1"].host != host
    return host, {each.name for each in found.values() if each.host == host}


def test_what_ray_cannot_place_is_an_error_and_leaves_nothing(nodes: RayNodes, tmp_path: Path) -> None:
    stack = ClusterStack(nodes, tmp_path, tmp_path, cluster={"talker": {"resources": {"CPU": 1.0}}})
    done = stack.call("up", "--config", str(stack.path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "cluster_failed: Ray cannot place the stack: Use the 'num_cpus'" in done.stderr
    assert "runs no stack" in stack.call("status").stderr


def test_processes_are_placed_where_there_is_room_and_listen_there(
    stack: ClusterStack, undisturbed: list[Heard]
) -> None:
    found = stack.processes()
    assert sorted(found) == ["gateway-1", "talker-1", "thinker-1", "token2wav-1"]
    assert max(Counter(each.host for each in found.values()).values()) <= CPUS
    assert found["gateway-1"].host != found["token2wav-1"].host
    listening = {
        f"{each.name}-1": (each.inbox or "").removeprefix("tcp://").rpartition(":")[0]
        for each in stack.status().stages
    }
    assert listening == {name: found[name].host for name in listening}


def test_a_second_stack_is_refused(stack: ClusterStack) -> None:
    done = stack.call("up", "--config", str(stack.path))
    assert done.returncode == 1
    assert "already runs a stack" in done.stderr


def test_scaling_under_load_loses_nothing_and_shares_the_work(
    stack: ClusterStack, undisturbed: list[Heard]
) -> None:
    stack.wait_until_ready()
    with Load([[stack.address]] * STREAMS, undisturbed) as load:
        load.wait_for_more()
        assert "token2wav: 2 ready" in stack.run("scale", "token2wav=2")
        found = stack.processes()
        assert found["token2wav-1"].host != found["token2wav-2"].host
        load.wait_for_more()
        steps = {each.pid: each.load.steps for each in stack.status().stages if each.name == "token2wav"}
        both = [found[f"token2wav-{number}"].pid for number in (1, 2)]
        assert all(steps[pid] for pid in both if pid is not None)
        assert "token2wav: 1 ready" in stack.run("scale", "token2wav=1")
        assert "token2wav-2" not in stack.processes()
        load.wait_for_more()
    assert load.wrong == []


def test_a_killed_process_is_restarted_by_ray(
    stack: ClusterStack, undisturbed: list[Heard], client: Client
) -> None:
    before = stack.processes()["talker-1"]
    streams = stack.ask(client)
    before_loss = stack.status().resumes
    wait_until(lambda: speaks(streams), "somebody hears something", ANSWERS_S)
    psutil.Process(before.pid).kill()
    check_heard(streams, undisturbed)
    assert stack.status().resumes > before_loss
    after = stack.wait_until_ready()["talker-1"]
    assert after.pid != before.pid
    assert after.restarts == before.restarts + 1


def test_a_killed_actor_leaves_no_key_behind(stack: ClusterStack) -> None:
    before = stack.wait_until_ready()["talker-1"]
    folder = folder_of(before.pid)
    assert list(folder.glob("*.key_secret"))
    psutil.Process(psutil.Process(before.pid).ppid()).kill()
    wait_until(lambda: not folder.exists(), "its directory is gone", FENCED_S)
    wait_until(lambda: stack.processes()["talker-1"].pid not in {before.pid, None}, "another one", ANSWERS_S)
    stack.wait_until_ready()


def test_a_node_that_comes_back_finds_its_processes_fenced(
    stack: ClusterStack, nodes: RayNodes, undisturbed: list[Heard], client: Client
) -> None:
    """And costs no answer; a node that is killed: ``test_cluster_gateways.py``."""
    host, names = without_gateway(stack, nodes)
    old = {stack.processes()[name].pid for name in names}
    streams = stack.ask(client)
    before_loss = stack.status().resumes
    wait_until(lambda: speaks(streams), "somebody hears something", ANSWERS_S)
    victims = nodes.freeze(host)
    try:
        assert old <= {each.pid for each in victims}
        check_heard(streams, undisturbed)
        assert stack.status().resumes > before_loss
        wait_until(lambda: away_from(stack, host, names), "they are elsewhere", ANSWERS_S)
        later = stack.ask(client)
        wait_until(lambda: speaks(later), "somebody hears something", ANSWERS_S)
    finally:
        nodes.thaw(host, victims)
        nodes.add()
    # The old processes run again while the new ones work on the same requests.
    check_heard(later, undisturbed)
    wait_until(lambda: gone(victims), "the old processes have ended", FENCED_S)
    ours = {each.pid for each in stack.processes().values()}
    wait_until(
        lambda: {each.pid for each in stack.status().stages if each.state == "ready"} <= ours,
        "only the new processes serve",
        FENCED_S,
    )


def test_a_gateway_that_loses_its_node_is_found_on_another(
    stack: ClusterStack, nodes: RayNodes, undisturbed: list[Heard]
) -> None:
    found = stack.wait_until_ready()
    before = found["gateway-1"]
    assert before.host is not None
    nodes.kill(before.host)
    staying = {each.pid for each in found.values() if each.host != before.host}
    try:
        wait_until(lambda: away_from(stack, before.host or "", {"gateway-1"}), "it is elsewhere", ANSWERS_S)
        # No model was loaded again but those of the node.
        assert staying <= {each.pid for each in stack.wait_until_ready().values()}
        with Client(stack.address) as client:
            streams = stack.ask(client)
            check_heard(streams, undisturbed)
    finally:
        nodes.add()
