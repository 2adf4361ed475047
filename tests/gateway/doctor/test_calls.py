"""The doctor on calls by WebRTC: packages, addresses, ports."""

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ops.doctor import calls
from ops.doctor.finding import Finding
from shared.config import Config


def found(gateway: dict[str, Any] | None = None, **webrtc: Any) -> list[Finding]:
    config = Config.model_validate({"gateway": {"webrtc": {"enabled": True, **webrtc}, **(gateway or {})}})
    return list(calls.check_calls(config))


def test_nothing_is_said_where_there_are_no_calls() -> None:
    assert found(enabled=False) == []


def test_what_clients_must_reach_is_said() -> None:
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    (finding,) = found(addresses=["127.0.0.1", "::1"], advertised=["192.0.2.10"])
    assert finding.level == "ok"
    assert f"UDP ports {first} to {last} at 192.0.2.10" in finding.what
    (finding,) = found(addresses=["127.0.0.1"])
    assert finding.what.endswith("at 127.0.0.1")
    (finding,) = found()
    assert finding.what.endswith("at every address of this machine")


def test_without_the_extra_the_gateway_would_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    (finding,) = found()
    assert finding.level == "problem"
    assert "omnirelay-server[webrtc]" in finding.advice


def test_calls_begin_over_http() -> None:
    (finding,) = found({"http": None})
    assert (finding.level, finding.advice) == ("problem", "set gateway.http")


def test_an_address_of_another_machine() -> None:
    (finding,) = found(addresses=["127.0.0.1", "192.0.2.10"])
    assert finding.level == "problem"
    assert finding.what == "not addresses of this machine: 192.0.2.10"


def test_too_few_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = tmp_path / "ip_local_port_range"
    few.write_text("50000\t50009\n")
    monkeypatch.setattr(calls, "PORT_RANGE", few)
    (finding,) = found(addresses=["127.0.0.1"])
    assert finding.level == "warning"
    assert finding.what.startswith("10 UDP ports for 10 calls")
    assert "at least 20" in finding.advice
    assert [each.level for each in found(max_calls=5)] == ["ok"]
