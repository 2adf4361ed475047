"""Ports for what tests start: free, none twice, and of another part of the range for each worker."""

import socket

import pytest

from tests.support import ports


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_candidates", None)


def test_a_port_is_given_once_and_only_if_nobody_listens_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ports.free_ports(50)
    assert len(set(given + ports.free_ports(50))) == 100
    with socket.create_server(("127.0.0.1", given[0])):
        monkeypatch.setattr(ports, "_candidates", iter([given[0], given[1]]))
        assert ports.free_ports(1) == [given[1]]


def test_two_workers_are_never_given_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for worker in ("gw0", "gw1"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        parts.append(set(ports._ours()))
    assert not parts[0] & parts[1]
