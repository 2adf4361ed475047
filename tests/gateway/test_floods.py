"""What anybody can cause has a bound in the log."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from shared.log.repeats import BURST, INTERVAL_S
from tests.support.processes import wait_until

FILES = 256


@contextmanager
def gateway(log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A gateway without stages."""
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "gateway"], stdout=file, stderr=file)
    try:
        wait_until(lambda: "listening on" in log.read_text(), "the gateway", 60)
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
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
            idle.enter_context(socket.create_connection(address(key), timeout=60))
        wait_until(lambda: "cannot accept connections" in log.read_text(), "the word about it", 60)
        # Descriptors are kept for those who watch it.
        assert [_answers(monitor) for _ in range(3)] == [True] * 3
        used = cpu_seconds(process)
        # It tries again once a second for each of the two addresses.
        wait_until(lambda: "more like this" in log.read_text(), "the count of what was not told", 60)
        assert cpu_seconds(process) - used < 5
        told = log.read_text()
        assert "raise the limit of open files" in told
        assert "Traceback" not in told
        assert len(told) < 10_000
        idle.close()
        wait_until(lambda: _answers(url), "an answer", 60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/livez", timeout=20).status_code == 200
    except httpx.TransportError:
        return False


def test_refused_requests_are_counted(place: Path, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIRELAY_GATEWAY__API_KEYS", keys)
    log = place / "gateway.log"
    host, port = address("HTTP")
    began = time.monotonic()
    with gateway(log), httpx.Client(base_url=f"http://{host}:{port}", timeout=60) as client:
        for _ in range(30):
            assert client.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        for _ in range(30):
            with socket.create_connection(address("LISTEN"), timeout=60) as peer:
                peer.sendall(b"\0\0\0\1x")
                while peer.recv(4096):
                    pass
    bursts = 1 + int((time.monotonic() - began) / INTERVAL_S)
    told = log.read_text().splitlines()
    for words in ("'another path' 401", "closed the connection of client"):
        lines = [line for line in told if words in line]
        more = [int(found[1]) for line in lines if (found := re.search(r"(\d+) more like this", line))]
        assert BURST <= len(lines) - len(more) <= bursts * BURST, words
        assert len(lines) - len(more) + sum(more) == 30, words
