"""Gateways that come and go while a stage runs: the file, the names in it, the links."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from omnirelay.errors import ConfigError
from shared.config import Config, GatewayAddresses
from shared.messages import Closing, Peers
from shared.stage import discovery
from shared.stage.discovery import MOST, GatewayFinder
from shared.stage.gateways import open_gateway
from tests.shared.stages import INSTANCE, STAGE
from tests.shared.support import Context, wait_until
from tests.shared.test_gateways import Following, Gateway, shared

NAME: Final = "gateways.example"


class NameServer:
    """Answers for one name; every other one, and with no addresses this one, is unknown."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.asked = 0

    def answer(self, host: str, *_: object) -> list[tuple[Any, ...]]:
        self.asked += 1
        if host != NAME or not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in self.addresses]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> NameServer:
    made = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", made.answer)
    monkeypatch.setattr(discovery, "LOOK_S", 0.01)
    return made


Begin = Callable[[dict[str, Any]], GatewayFinder]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


@pytest.fixture
def begin(path: Path) -> Iterator[Begin]:
    """Starts to look for the gateways of a configuration's section, which is written to the file."""
    finders = []

    def begin(gateway: dict[str, Any]) -> GatewayFinder:
        config = Config.model_validate({"gateway": gateway, "security": {"internal_network": True}})
        write(path, gateway)
        finders.append(GatewayFinder(path))
        finders[-1].begin(config.gateway)
        return finders[-1]

    yield begin
    for each in finders:
        each.stop()
        each.join(20)
        assert not each.is_alive()


def write(path: Path, gateway: dict[str, Any]) -> None:
    settings = {"gateway": gateway, "security": {"internal_network": True}}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")


def at(host: str) -> dict[str, str]:
    return {"events": f"tcp://{host}:5560", "control": f"tcp://{host}:5561"}


def found(finder: GatewayFinder) -> list[str]:
    return [each.control for each in finder.found]


def test_a_name_is_a_gateway_at_each_of_its_addresses_and_followed(names: NameServer, begin: Begin) -> None:
    finder = begin(at(NAME))
    assert found(finder) == []
    names.addresses = ["10.0.0.10", "10.0.0.9"]
    wait_until(lambda: len(finder.found) == 2)
    assert finder.found == (GatewayAddresses(**at("10.0.0.9")), GatewayAddresses(**at("10.0.0.10")))
    names.addresses = ["10.0.0.10", "10.0.0.11", "10.0.0.10"]
    wait_until(lambda: found(finder) == ["tcp://10.0.0.10:5561", "tcp://10.0.0.11:5561"])
    # A name server that is away changes nothing.
    names.addresses = []
    asked = names.asked
    wait_until(lambda: names.asked > asked + 3)
    assert found(finder) == ["tcp://10.0.0.10:5561", "tcp://10.0.0.11:5561"]


def test_addresses_and_names_of_this_machine_are_used_as_they_are(names: NameServer, begin: Begin) -> None:
    names.addresses = ["10.0.0.1"]
    here = {"events": "ipc:///run/events", "control": "ipc:///run/control"}
    apart = {"events": f"tcp://{NAME}:1", "control": "tcp://control.example:2"}
    others = [at("localhost"), at("[fd00::1]"), here, apart, at(NAME), at("10.0.0.1")]
    finder = begin(at("10.0.0.7") | {"others": others})
    literal = [
        "tcp://10.0.0.7:5561",
        "tcp://localhost:5561",
        "tcp://[fd00::1]:5561",
        here["control"],
        apart["control"],
        "tcp://10.0.0.1:5561",
    ]
    # The name's address is listed, too, and is one gateway.
    wait_until(lambda: sorted(found(finder)) == sorted(literal) and names.asked > 1)


def test_more_addresses_than_gateways_may_be_are_not_followed(names: NameServer, begin: Begin) -> None:
    names.addresses = [f"10.0.1.{number}" for number in range(200)]
    finder = begin(at(NAME))
    wait_until(lambda: bool(finder.found))
    assert len(finder.found) == MOST


def test_the_file_is_read_again_when_asked(names: NameServer, begin: Begin, path: Path) -> None:
    names.addresses = ["10.0.0.1"]
    finder = begin(at("10.0.0.7"))
    assert found(finder) == ["tcp://10.0.0.7:5561"]
    write(path, {"replicas": 2, **at("10.0.0.7"), "others": [at(NAME)]})
    asked = names.asked
    finder.reload()
    wait_until(lambda: names.asked > asked)
    wait_until(lambda: len(finder.found) == 3)
    assert found(finder) == ["tcp://10.0.0.7:5561", "tcp://10.0.0.7:5661", "tcp://10.0.0.1:5561"]
    path.write_text("gateway: [")
    asked = names.asked
    finder.reload()
    wait_until(lambda: names.asked > asked + 3)
    assert len(finder.found) == 3


def test_a_change_before_the_start_is_not_missed(names: NameServer, path: Path) -> None:
    """The signal may come between reading the file and the start."""
    finder = GatewayFinder(path)
    write(path, at("10.0.0.8"))
    finder.reload()
    settings = {"gateway": at("10.0.0.7"), "security": {"internal_network": True}}
    finder.begin(Config.model_validate(settings).gateway)
    try:
        wait_until(lambda: found(finder) == ["tcp://10.0.0.8:5561"])
    finally:
        finder.stop()
        finder.join(20)


@pytest.fixture
def stage(context: Context) -> Iterator[Following]:
    with shared(context) as stage:
        yield stage


def test_gateways_come_and_go_beside_one_that_stays(context: Context, stage: Following) -> None:
    one, other = Gateway(context, "aaaaaaaa"), Gateway(context, "bbbbbbbb")
    # Without any gateway it reports to its own checks.
    wait_until(lambda: stage.loop.report is not None)
    stage.list(one)
    stage.hears(one)
    stage.list(one, other)
    stage.hears(other)
    stage.work("aaaaaaaa1")
    stage.work("bbbbbbbb1")
    for each in (one, other):
        wait_until(lambda each=each: bool(each.told), each.hear)  # type: ignore[misc]
        assert [told.request_id for told in each.told] == [f"{each.name}1"]
    # While it answers, its link stays, though it is listed no more.
    stage.list(one)
    rounds = stage.queues.beats[0]
    wait_until(lambda: stage.queues.beats[0] > rounds + 20, lambda: other.tell(Peers(gateway=other.name)))
    assert len(stage.queues.links) == 2
    other.tell(Closing())
    wait_until(lambda: len(stage.queues.links) == 1)
    sent = stage.queues.beats[0]
    assert sent > rounds
    assert stage.service.aborts == ["bbbbbbbb1"]
    stage.work("aaaaaaaa2")
    wait_until(lambda: len(one.told) == 2, one.hear)
    # It comes back at its address.
    stage.list(one, other)
    other.done.clear()
    stage.hears(other)
    wait_until(lambda: [link.name for link in stage.queues.links] == [one.name, other.name])
    assert stage.queues.beats[0] >= sent


def test_a_gateway_that_was_never_there_leaves_nothing(context: Context, stage: Following) -> None:
    one = Gateway(context, "aaaaaaaa")
    absent = GatewayAddresses(events="tcp://127.0.0.1:1", control="tcp://127.0.0.1:2")
    stage.list(one)
    stage.found.append(absent)
    stage.hears(one)
    wait_until(lambda: len(stage.queues.links) == 2)
    gone = next(link for link in stage.queues.links if link.name is None)
    stage.list(one)
    wait_until(lambda: gone.control.socket.closed)
    assert [link.name for link in stage.queues.links] == [one.name]


def test_what_is_refused_counts_for_all_gateways_that_were(context: Context, stage: Following) -> None:
    one = Gateway(context, "aaaaaaaa")
    stage.list(one)
    stage.hears(one)
    one.control.send_multipart([STAGE.encode(), b"nonsense"])
    wait_until(lambda: stage.queues.refused.total() == 1)
    one.tell(Closing())
    stage.list()
    wait_until(lambda: not stage.queues.links)
    assert stage.membership.queues.refused.total() == 1


def test_an_address_that_cannot_be_used_leaves_no_socket(context: Context) -> None:
    place = GatewayAddresses.model_construct(events="tcp://nowhere", control="tcp://127.0.0.1:1")
    before = len(context.made)
    with pytest.raises(ConfigError, match="cannot connect"):
        open_gateway(context, place, Config(), "talker", INSTANCE)
    assert all(each.closed for each in context.made[before:])
