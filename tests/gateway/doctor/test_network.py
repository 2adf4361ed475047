"""The doctor on addresses: with ports that are taken, equal, open, or nowhere."""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ops.addresses import addresses
from ops.doctor import network
from ops.doctor.finding import Finding
from shared.config import Config
from shared.messages import STAGES
from tests.gateway.bench import bench, make_config
from tests.support.ports import free_ports
from tests.support.stack import merge


def configured(security: dict[str, Any] | None = None, **addresses: str) -> Config:
    """A configuration on free ports; ``addresses`` replace some, by the last word of their key."""
    metrics = [f"{stage} http" for stage in STAGES]
    names = ["listen", "events", "control", "http", "monitor", *STAGES, *metrics]
    ports = free_ports(len(names))
    found = {name: f"tcp://127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)} | addresses
    stages: dict[str, Any] = {
        stage: {"inbox": found.pop(stage), "http": found.pop(f"{stage} http")} for stage in STAGES
    }
    return Config.model_validate({"gateway": found, "stages": stages, "security": security or {}})


def ports(config: Config) -> list[Finding]:
    return list(network.check_ports(config, network.ask_gateway(config)))


def test_every_address_is_looked_at() -> None:
    config = configured()
    keys = dict(addresses(config))
    assert list(keys) == [
        "gateway.listen",
        "gateway.events",
        "gateway.control",
        "gateway.http",
        "gateway.monitor",
        *(f"stages.{stage}.{which}" for stage in STAGES for which in ("inbox", "http")),
    ]
    assert keys["gateway.listen"] == config.gateway.listen


def test_the_ports_of_further_replicas_are_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        first = configured(None, **{"talker http": f"tcp://127.0.0.1:{port - 20}"}).model_dump()
        first["stages"]["talker"]["replicas"] = 3
        config = Config.model_validate(first)
        (finding,) = ports(config)
        assert finding.what.startswith(f"tcp://127.0.0.1:{port} (stages.talker.http (replica 3)) is in use")
        assert finding.advice.endswith("or set stages.talker.http to another address")
        first["stages"]["thinker"]["http"] = f"tcp://127.0.0.1:{port - 10}"
        (finding,) = network.check_addresses(Config.model_validate(first))
        assert "stages.thinker.http, stages.talker.http (replica 2) are the same address" in finding.what
    first["stages"]["talker"] |= {"http": "tcp://127.0.0.1:65530", "replicas": 2}
    (finding,) = ports(Config.model_validate(first))
    assert "(stages.talker.http (replica 2)) cannot be used: there is no such port" in finding.what


def test_all_is_free() -> None:
    assert [finding.level for finding in ports(configured())] == ["ok"]
    assert [finding.level for finding in network.check_addresses(configured())] == ["ok"]


def test_a_port_that_another_program_uses_is_named_with_the_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        (finding,) = ports(configured(talker=address))
    assert finding.level == "problem"
    assert finding.what.startswith(f"{address} (stages.talker.inbox) is in use by ")
    assert finding.what.endswith(f"pid {os.getpid()}")
    assert "stages.talker.inbox" in finding.advice


async def test_the_gateways_port_used_by_something_that_is_no_gateway() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-other\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        config = configured(listen=f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        (finding,) = await asyncio.to_thread(ports, config)
        assert finding.level == "problem"
        assert "gateway.listen" in finding.what


async def test_ports_held_by_a_running_omnirelay(configure: Callable[..., Config]) -> None:
    async with bench(configure()) as b:
        (finding,) = await asyncio.to_thread(ports, b.config)
        assert finding.level == "ok"
        assert f"gateway pid {os.getpid()}: thinker ready, talker ready, token2wav ready" in finding.what


async def test_an_omnirelay_whose_stages_are_not_ready(configure: Callable[..., Config]) -> None:
    async with bench(configure(), ready=False, alive=()) as b:
        (finding,) = await asyncio.to_thread(ports, b.config)
        assert finding.level == "warning"
        assert "thinker starting" in finding.what


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 64 + ".example"])
def test_an_address_of_another_machine(host: str) -> None:
    (finding,) = ports(configured({"keys": "somewhere"}, thinker=f"tcp://{host}:5562"))
    assert finding.level == "warning"
    assert finding.what == f"tcp://{host}:5562 (stages.thinker.inbox) is not an address of this machine"


def test_unix_sockets(tmp_path: Path) -> None:
    assert [each.level for each in ports(configured(events=f"ipc://{tmp_path}/free"))] == ["ok"]
    (tmp_path / "left behind").touch()
    assert [each.level for each in ports(configured(events=f"ipc://{tmp_path}/left behind"))] == ["ok"]
    with closing(socket.socket(socket.AF_UNIX)) as other:
        other.bind(str(tmp_path / "taken"))
        other.listen()
        (finding,) = ports(configured(events=f"ipc://{tmp_path}/taken"))
    assert finding.level == "problem"
    assert "is in use" in finding.what
    for path in (f"{tmp_path}/no/such/folder", f"{tmp_path}/{'x' * 120}"):
        (finding,) = ports(configured(control=f"ipc://{path}"))
        assert finding.level == "problem"
        assert "gateway.control" in finding.what


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tcp://127.0.0.1:5999", "tcp://127.0.0.1:5999"),
        ("tcp://127.0.0.1:5999", "tcp://localhost:5999"),
        ("tcp://[::1]:5999", "tcp://[::1]:5999"),
        ("ipc:///tmp/one", "ipc:///tmp/../tmp/one"),
    ],
)
def test_equal_addresses(one: str, other: str) -> None:
    findings = list(network.check_addresses(configured(events=one, thinker=other)))
    assert [finding.level for finding in findings] == ["problem"]
    assert "gateway.events, stages.thinker.inbox are the same address" in findings[0].what


def test_addresses_that_others_can_reach() -> None:
    config = configured(
        {"internal_network": True},
        control="tcp://0.0.0.0:5999",
        talker="tcp://talker:5563",
        events="ipc:///tmp/events",
    )
    (finding,) = network.check_addresses(config)
    assert finding.level == "warning"
    assert "gateway.control tcp://0.0.0.0:5999, stages.talker.inbox tcp://talker:5563" in finding.what


def test_an_open_port_collides_with_the_same_one_of_the_loopback(checkpoint_dir: Path) -> None:
    config = make_config(checkpoint_dir, {"http": "tcp://0.0.0.0:5999", "control": "tcp://127.0.0.1:5999"})
    assert [finding.level for finding in network.check_addresses(config)] == ["problem"]


def test_an_address_that_is_told_or_found_is_no_place_to_listen() -> None:
    stages = {stage: {"inbox": "tcp://127.0.0.1:*", "http": None} for stage in STAGES}
    stages["talker"]["advertise"] = "tcp://far.example:5563"
    config = Config.model_validate({"stages": stages, "security": {"internal_network": True}})
    keys = dict(addresses(config))
    assert not [key for key in keys if key.startswith("stages.")]


def test_addresses_that_need_a_key_are_not_open() -> None:
    keyed = {"keys": "somewhere"}
    (finding,) = network.check_addresses(configured(keyed, talker="tcp://talker:5563"))
    assert (finding.level, finding.what[-18:]) == ("ok", ", or who has a key")
    (finding,) = network.check_addresses(
        configured(keyed, talker="tcp://talker:5563", **{"thinker http": "tcp://0.0.0.0:5999"})
    )
    assert finding.level == "warning"
    assert finding.what.endswith("from other machines: stages.thinker.http tcp://0.0.0.0:5999")


def with_others(*others: tuple[str, str]) -> list[Finding]:
    listed = [{"events": events, "control": control} for events, control in others]
    settings = configured(security={"internal_network": True}).model_dump()
    return list(network.check_others(Config.model_validate(merge(settings, {"gateway": {"others": listed}}))))


def test_gateways_elsewhere_are_asked_for() -> None:
    assert with_others() == []
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        places = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (one, two)]
        (finding,) = with_others((places[0], places[1]))
        assert (finding.level, finding.what) == ("ok", "all 1 of gateway.others can be reached")
    (finding,) = with_others((places[0], places[1]), ("ipc:///nowhere/a", "tcp://nowhere.invalid:1"))
    assert finding.level == "warning"
    assert f"{places[0]} (gateway.others.0.events: Connection refused)" in finding.what
    assert "ipc:///nowhere/a (gateway.others.1.events: No such file or directory)" in finding.what
    assert "tcp://nowhere.invalid:1 (gateway.others.1.control: " in finding.what


def test_gateways_elsewhere_that_cannot_be_are_problems() -> None:
    config = configured()
    same, free = config.gateway.control, "tcp://127.0.0.1:1"
    settings = config.model_dump()
    settings["gateway"]["others"] = [{"events": free, "control": same}, {"events": free, "control": free}]
    found = list(network.check_others(Config.model_validate(settings)))
    assert [each.level for each in found] == ["problem", "problem", "problem", "warning"]
    assert f"{same} (gateway.others.0.control): gateway.control is the same address" in found[0].what
    assert "gateway.others.1.events): gateway.others.0.events is the same address" in found[1].what
    (finding,) = with_others(("tcp://0.0.0.0:5560", "tcp://0.0.0.0:5561"))[:1]
    assert (finding.level, "nobody can connect to it" in finding.what) == ("problem", True)
