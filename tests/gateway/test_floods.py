"""What anybody can cause has a bound in the log."""

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from shared.log.repeats import BURST
from tests.support.processes import wait_until

FILES = 256


@contextmanager
def gateway(log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A gateway without stages."""
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "gateway"], stdout=file, stderr=file)
    try:
        wait_until(lambda: "listening on" in log.read_text(), "the gateway", 30)
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()


def address(key: str) -> tuple[str, int]:
    host, port = os.environ[f"OMNIRELAY_GATEWAY__{key}"].removeprefix("tcp://").split(":")
    return host, int(port)


def cpu_seconds(process: "subprocess.Popen[bytes]") -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_gateway_without_files_for_connections_says_so_now_and_then_and_can_be_watched(place: Path) -> None:
    log = place / "gateway.log"
    url, monitor = (
        os.environ[f"OMNIRELAY_GATEWAY__{key}"].replace("tcp:", "http:") for key in ("HTTP", "MONITOR")
    )
    with gateway(log) as process, ExitStack() as idle:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        for key in ["LISTEN"] * 300 + ["HTTP"] * 30:
            idle.enter_context(socket.create_connection(address(key), timeout=5))
        wait_until(lambda: "no connections are taken" in log.read_text(), "the word about it", 10)
        # Descriptors are kept for those who watch it.
        assert [_answers(monitor) for _ in range(3)] == [True] * 3
        used = cpu_seconds(process)
        # It tries again once a second for each of the two addresses.
        wait_until(lambda: "more like this" in log.read_text(), "the count of what was not told", 30)
        assert cpu_seconds(process) - used < 5
        told = log.read_text()
        assert "raise the limit of open files" in told
        assert "Traceback" not in told
        assert len(told) < 10_000
        idle.close()
        wait_until(lambda: _answers(url), "an answer", 15)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/livez", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def test_refused_requests_are_counted(place: Path, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIRELAY_GATEWAY__API_KEYS", keys)
    log = place / "gateway.log"
    host, port = address("HTTP")
    with gateway(log), httpx.Client(base_url=f"http://{host}:{port}", timeout=5) as client:
        for _ in range(30):
            assert client.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        for _ in range(30):
            with socket.create_connection(address("LISTEN"), timeout=5) as peer:
                peer.sendall(b"\0\0\0\1x")
                while peer.recv(4096):
                    pass
    told = log.read_text().splitlines()
    for words in ("'another path' 401", "hung up on client"):
        *some, last = [line for line in told if words in line]
        assert len(some) == BURST, words
        assert f"{30 - BURST} more like this" in last
