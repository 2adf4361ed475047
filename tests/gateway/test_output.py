"""A log that nobody reads stops nothing, and what anybody can cause has a bound in it."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from omnirelay import Client
from omnirelay.errors import GatewayUnreachableError, MessageError
from omnirelay.protocol import parse_tcp
from ops.console import Console
from shared.log.repeats import BURST, INTERVAL_S
from tests.gateway.bench import Output, Patch
from tests.support.children import Child, python
from tests.support.processes import wait_until

START_S = 90.0
STOP_S = 60.0


def up(stdout: Any) -> "Child[bytes]":
    """``omnirelay up`` with imitated stages."""
    environment = os.environ | {"OMNIRELAY_LOG_LEVEL": "debug", "OMNIRELAY_LOG_FORMAT": "json"}
    return Child(python("-m", "omnirelay.cli", "up"), stdout=stdout, stderr=subprocess.PIPE, env=environment)


def ready() -> bool:
    try:
        with Client(os.environ["OMNIRELAY_GATEWAY__LISTEN"]) as client:
            return client.status().ready
    except (GatewayUnreachableError, MessageError):
        return False


def url(key: str = "HTTP") -> str:
    return os.environ[f"OMNIRELAY_GATEWAY__{key}"].replace("tcp:", "http:")


def address(key: str) -> tuple[str, int]:
    return parse_tcp(os.environ[f"OMNIRELAY_GATEWAY__{key}"])


def answers(path: str = "readyz", key: str = "HTTP") -> bool:
    try:
        return httpx.get(f"{url(key)}/{path}", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    assert process.wait(STOP_S) == 0


def write_lines(count: int) -> None:
    """Let the gateway write so many lines: one for each request that is served."""
    batch = 100
    with socket.create_connection(address("HTTP"), timeout=60) as peer, peer.makefile("rb") as answers:
        for _ in range(0, count, batch):
            peer.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * batch)
            for _ in range(batch):
                assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
                length = 0
                while (line := answers.readline()) != b"\r\n":
                    name, _, value = line.partition(b": ")
                    length = int(value) if name.lower() == b"content-length" else length
                answers.read(length)


def dropped() -> int:
    told = httpx.get(f"{url()}/metrics", timeout=60).text
    (count,) = re.findall(r'omnirelay_log_lines_dropped_total\{stage="gateway"\} (\S+)', told)
    return int(float(count))


def lines_are_dropped() -> bool:
    write_lines(1000)
    return dropped() > 0


@pytest.mark.parametrize("full", [True, False], ids=["a full disk", "a pager that shows its first page"])
def test_a_launcher_whose_log_takes_nothing_serves_and_ends(place: Path, full: bool) -> None:
    with Path("/dev/full").open("wb") as disk, up(disk if full else subprocess.PIPE) as process:
        wait_until(ready, "readiness", START_S)
        wait_until(lines_are_dropped, "a line that is dropped", START_S)
        assert answers()
        end(process)
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_a_launcher_that_is_stopped_does_not_stop_the_gateway(place: Path) -> None:
    log = place / "up.log"
    with log.open("wb") as file, up(file) as process:
        wait_until(ready, "readiness", START_S)
        process.send_signal(signal.SIGSTOP)
        wait_until(lines_are_dropped, "a line that is dropped", START_S)
        assert answers()
        lost = dropped()
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: b"lines dropped" in log.read_bytes(), "the word about what was dropped", START_S)
        assert answers()
        end(process)
    told = [json.loads(line) for line in log.read_text().splitlines()]
    notices = [each["message"] for each in told if "lines dropped" in each["message"]]
    assert sum(int(notice.split()[0]) for notice in notices) >= lost
    assert {each["process"] for each in told} == {"launcher", "gateway", "thinker", "talker", "token2wav"}
    assert told[-1]["message"] == "stopped"


def test_what_processes_write_is_passed_on_with_their_names(capfd: Output) -> None:
    console = Console()
    line = {"ts": "2026-03-01T12:00:00+00:00", "process": "thinker", "message": "hello"}
    console.form = "text"
    console.show("thinker", "2026-03-01T12:00:00+00:00 INFO thinker services: hello")
    console.announce("ready")
    console.form = "json"
    console.show("thinker", json.dumps(line))
    console.show("thinker 2", json.dumps(line))
    console.show("thinker", "Segmentation fault")
    console.announce("ready")
    console.flush()
    first, second, *objects = capfd.readouterr().out.splitlines()
    assert first == "[thinker] 2026-03-01T12:00:00+00:00 INFO thinker services: hello"
    assert second.endswith(" INFO launcher ops.console: ready")
    known, replica, foreign, own = map(json.loads, objects)
    assert known == line
    assert replica == line | {"process": "thinker 2"}
    assert (foreign["process"], foreign["message"]) == ("thinker", "Segmentation fault")
    assert (own["process"], own["message"]) == ("launcher", "ready")


FILES = 256


@contextmanager
def gateway(log: Path) -> Iterator["subprocess.Popen[Any]"]:
    """A gateway without stages."""
    with log.open("wb") as file, Child(python("-m", "gateway"), stdout=file, stderr=file) as process:
        wait_until(lambda: "listening on" in log.read_text(), "the gateway", 60)
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def cpu_seconds(process: "subprocess.Popen[bytes]") -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
def test_a_gateway_without_files_for_connections_says_so_now_and_then_and_can_be_watched(place: Path) -> None:
    log = place / "gateway.log"
    with gateway(log) as process, ExitStack() as idle:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        for key in ["LISTEN"] * 300 + ["HTTP"] * 30:
            idle.enter_context(socket.create_connection(address(key), timeout=60))
        wait_until(lambda: "cannot accept connections" in log.read_text(), "the word about it", 60)
        # Descriptors are kept for those who watch it.
        assert [answers("livez", "MONITOR") for _ in range(3)] == [True] * 3
        used = cpu_seconds(process)
        # It tries again once a second for each of the two addresses.
        wait_until(lambda: "more like this" in log.read_text(), "the count of what was not told", 60)
        assert cpu_seconds(process) - used < 5
        told = log.read_text()
        assert "raise the limit of open files" in told
        assert "Traceback" not in told
        assert len(told) < 10_000
        idle.close()
        wait_until(lambda: answers("livez"), "an answer", 60)


def test_refused_requests_are_counted(place: Path, keys: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("OMNIRELAY_GATEWAY__API_KEYS", keys)
    log = place / "gateway.log"
    began = time.monotonic()
    with gateway(log), httpx.Client(base_url=url(), timeout=60) as client:
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
