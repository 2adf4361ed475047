"""The doctor on addresses, keys of sockets, and calls: what is taken, equal, open, spoiled, or nowhere."""

import asyncio
import os
import socket
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import zmq

from ops.addresses import addresses
from ops.doctor import access, network
from ops.doctor.finding import Finding
from shared.config import Config
from shared.messages import ROLES, STAGES
from shared.transport.keys import make_keys, public_file, secret_file
from tests.gateway.bench import Configure, Patch, bench
from tests.gateway.checkpoint_dir import levels, only
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
        *(f"gateway.{name}" for name in ("listen", "events", "control", "http", "monitor")),
        *(f"stages.{stage}.{which}" for stage in STAGES for which in ("inbox", "http")),
    ]
    assert keys["gateway.listen"] == config.gateway.listen


def test_the_ports_of_further_replicas_are_looked_at() -> None:
    # Not one of the kernel's: those before it must be free.
    with socket.create_server(("127.0.0.1", free_ports(1)[0] + 20)) as other:
        port = other.getsockname()[1]
        first = configured(None, **{"talker http": f"tcp://127.0.0.1:{port - 20}"}).model_dump()
        first["stages"]["talker"]["replicas"] = 3
        found = only(ports(Config.model_validate(first)), "problem")
        assert found.what.startswith(f"tcp://127.0.0.1:{port} (stages.talker.http (replica 3)) is in use")
        assert found.advice.endswith("or set stages.talker.http to another address")
        first["stages"]["thinker"]["http"] = f"tcp://127.0.0.1:{port - 10}"
        same = "stages.thinker.http, stages.talker.http (replica 2) are the same address"
        only(network.check_addresses(Config.model_validate(first)), "problem", same)
    first["stages"]["talker"] |= {"http": "tcp://127.0.0.1:65530", "replicas": 2}
    nowhere = "(stages.talker.http (replica 2)) cannot be used: there is no such port"
    only(ports(Config.model_validate(first)), "problem", nowhere)


def test_all_is_free() -> None:
    assert levels(ports(configured())) == levels(network.check_addresses(configured())) == ["ok"]


def test_a_port_that_another_program_uses_is_named_with_the_program() -> None:
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        # As the kernel cuts a longer name.
        comm.write_bytes("\u00fcberwachungsd\u00fc".encode()[:15])
        found = only(ports(configured(talker=address)), "problem")
        comm.write_bytes(before)
    assert found.what.startswith(f"{address} (stages.talker.inbox) is in use by \u00fcberwachungsd\ufffd, ")
    assert found.what.endswith(f"pid {os.getpid()}")
    assert "stages.talker.inbox" in found.advice


async def test_the_gateways_port_used_by_something_that_is_no_gateway() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-other\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        config = configured(listen=f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        only(await asyncio.to_thread(ports, config), "problem", "gateway.listen")


@pytest.mark.parametrize(
    ("ready", "level", "told"),
    [(True, "ok", "thinker ready, talker ready, token2wav ready"), (False, "warning", "thinker starting")],
)
async def test_ports_of_a_running_omnirelay(configure: Configure, ready: bool, level: str, told: str) -> None:
    async with bench(configure(), ready=ready, alive=STAGES if ready else ()) as b:
        only(await asyncio.to_thread(ports, b.config), level, f"gateway pid {os.getpid()}: {told}")


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 64 + ".example"])
def test_an_address_of_another_machine(host: str) -> None:
    found = only(ports(configured({"keys": "somewhere"}, thinker=f"tcp://{host}:5562")), "warning")
    assert found.what == f"tcp://{host}:5562 (stages.thinker.inbox) is not an address of this machine"


def test_unix_sockets(tmp_path: Path) -> None:
    (tmp_path / "left behind").touch()
    for name in ("free", "left behind"):
        only(ports(configured(events=f"ipc://{tmp_path}/{name}")), "ok")
    with closing(socket.socket(socket.AF_UNIX)) as other:
        other.bind(str(tmp_path / "taken"))
        other.listen()
        only(ports(configured(events=f"ipc://{tmp_path}/taken")), "problem", "is in use")
    for path in (f"{tmp_path}/no/such/folder", f"{tmp_path}/{'x' * 120}"):
        only(ports(configured(control=f"ipc://{path}")), "problem", "gateway.control")


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
    found = network.check_addresses(configured(events=one, thinker=other))
    only(found, "problem", "gateway.events, stages.thinker.inbox are the same address")


def test_an_open_port_collides_with_the_same_one_of_the_loopback() -> None:
    config = configured(http="tcp://0.0.0.0:5999", control="tcp://127.0.0.1:5999")
    only(network.check_addresses(config), "problem")


def test_an_address_that_is_told_or_found_is_no_place_to_listen() -> None:
    stages = {stage: {"inbox": "tcp://127.0.0.1:*", "http": None} for stage in STAGES}
    stages["talker"]["advertise"] = "tcp://far.example:5563"
    config = Config.model_validate({"stages": stages, "security": {"internal_network": True}})
    assert not [key for key in dict(addresses(config)) if key.startswith("stages.")]


def test_addresses_that_others_can_reach() -> None:
    open_ones = {
        "control": "tcp://0.0.0.0:5999",
        "talker": "tcp://talker:5563",
        "events": "ipc:///tmp/events",
    }
    told = "gateway.control tcp://0.0.0.0:5999, stages.talker.inbox tcp://talker:5563"
    only(network.check_addresses(configured({"internal_network": True}, **open_ones)), "warning", told)
    keyed = {"keys": "somewhere"}
    two = {"gateway": {"replicas": 2, "listen": "tcp://0.0.0.0:5998", "events": "tcp://0.0.0.0:5999"}}
    settings = merge(configured(keyed, talker="tcp://talker:5563").model_dump(), two)
    found = only(network.check_addresses(Config.model_validate(settings)), "ok")
    assert found.what.endswith(", or who has a key")
    metrics = configured(keyed, talker="tcp://talker:5563", **{"thinker http": "tcp://0.0.0.0:5999"})
    found = only(network.check_addresses(metrics), "warning")
    assert found.what.endswith("from other machines: stages.thinker.http tcp://0.0.0.0:5999")


def with_others(*others: tuple[str, str]) -> list[Finding]:
    listed = [{"events": events, "control": control} for events, control in others]
    settings = configured(security={"internal_network": True}).model_dump()
    return list(network.check_others(Config.model_validate(merge(settings, {"gateway": {"others": listed}}))))


def test_gateways_elsewhere_are_asked_for() -> None:
    assert with_others() == []
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        places = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (one, two)]
        only(with_others((places[0], places[1])), "ok", "all 1 of gateway.others can be reached")
    only(
        with_others((places[0], places[1]), ("ipc:///nowhere/a", "tcp://nowhere.invalid:1")),
        "warning",
        f"{places[0]} (gateway.others.0.events: Connection refused)",
        "ipc:///nowhere/a (gateway.others.1.events: No such file or directory)",
        "tcp://nowhere.invalid:1 (gateway.others.1.control: ",
    )


def test_gateways_elsewhere_that_cannot_be_are_problems() -> None:
    config = configured()
    same, free = config.gateway.control, "tcp://127.0.0.1:1"
    settings = config.model_dump()
    settings["gateway"]["others"] = [{"events": free, "control": same}, {"events": free, "control": free}]
    found = list(network.check_others(Config.model_validate(settings)))
    assert levels(found) == ["problem", "problem", "problem", "warning"]
    assert f"{same} (gateway.others.0.control): gateway.control is the same address" in found[0].what
    assert "gateway.others.1.events): gateway.others.0.events is the same address" in found[1].what
    anywhere = with_others(("tcp://0.0.0.0:5560", "tcp://0.0.0.0:5561"))[:1]
    only(anywhere, "problem", "nobody can connect to it")


def of_calls(gateway: dict[str, Any] | None = None, **webrtc: Any) -> list[Finding]:
    config = Config.model_validate({"gateway": {"webrtc": {"enabled": True, **webrtc}, **(gateway or {})}})
    return list(network.check_calls(config))


def test_what_callers_must_reach_is_said() -> None:
    assert of_calls(enabled=False) == []
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    told = f"UDP ports {first} to {last} at 192.0.2.10"
    only(of_calls(addresses=["127.0.0.1", "::1"], advertised=["192.0.2.10"]), "ok", told)
    assert only(of_calls(addresses=["127.0.0.1"]), "ok").what.endswith("at 127.0.0.1")
    assert only(of_calls(), "ok").what.endswith("at every address of this machine")


def test_calls_that_cannot_be_made(monkeypatch: Patch, tmp_path: Path) -> None:
    assert only(of_calls({"http": None}), "problem").advice == "set gateway.http"
    elsewhere = only(of_calls(addresses=["127.0.0.1", "192.0.2.10"]), "problem")
    assert elsewhere.what == "not addresses of this machine: 192.0.2.10"
    few = tmp_path / "ip_local_port_range"
    few.write_text("50000\t50009\n")
    monkeypatch.setattr(network, "PORT_RANGE", few)
    found = only(of_calls(addresses=["127.0.0.1"]), "warning", "10 UDP ports for 10 calls")
    assert "at least 20" in found.advice
    only(of_calls(max_calls=5), "ok")

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert "omnirelay-server[webrtc]" in only(of_calls(), "problem").advice


def of_keys(keys: Path | None = None, inbox: str = "tcp://127.0.0.1:5562", **section: Any) -> list[Finding]:
    values = {"security": {"keys": str(keys) if keys else None, **section}}
    return list(access.check_keys(Config.model_validate({**values, "stages": {"thinker": {"inbox": inbox}}})))


def test_keys_that_are_not_there(tmp_path: Path) -> None:
    only(of_keys(), "ok", "none are needed")
    internal = of_keys(inbox="tcp://thinker:5562", internal_network=True)
    assert only(internal, "warning", "security.internal_network says").check == "keys"
    only(of_keys(tmp_path), "problem", "has no .key_secret file")


def test_keys_in_order_and_spoiled(tmp_path: Path, monkeypatch: Patch) -> None:
    make_keys(tmp_path, replace=False)
    assert levels(of_keys(tmp_path)) == ["ok"] * len(ROLES)
    secret_file(tmp_path, "talker").chmod(0o644)
    found = of_keys(tmp_path)
    assert set(levels(found)) == {"ok", "problem"}
    (problem,) = (each for each in found if each.level == "problem")
    assert "talker.key_secret may be read by others (mode 0644)" in problem.what
    for role in ROLES[1:]:
        secret_file(tmp_path, role).unlink()
    assert only(of_keys(tmp_path), "ok").what.startswith("the gateway has its keys")
    with monkeypatch.context() as without:
        without.setattr(zmq, "has", lambda _: False)
        only(of_keys(tmp_path), "problem", "built without CURVE")
    make_keys(tmp_path, replace=True)
    public_file(tmp_path, "talker").unlink()
    found = of_keys(tmp_path)
    assert levels(found) == ["problem"] * len(ROLES)
    assert all("talker.key: No such file" in each.what for each in found)
