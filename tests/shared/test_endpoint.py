"""A stage's HTTP endpoint: real sockets, clients that behave and clients that do not."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from omnirelay.errors import AddressInUseError, ConfigError
from shared.http import protocol
from shared.http.server import MAX_WATCHERS
from shared.metrics import counter
from shared.stage.endpoint import HttpEndpoint
from tests.shared.support import DEADLINE_S, free_address, port_of, wait_until
from tests.support.http import PROMETHEUS, get
from tests.support.ports import has_ipv6

Reason = str | None
LARGE = 32 * 2**20
"""Bytes of an answer that the buffers of two sockets do not hold."""
ANSWERED = b"GET /livez HTTP/1.1\r\nHost: here\r\n\r\n"


class Large(Collector):
    def collect(self) -> Iterator[Metric]:
        yield counter("large_total", "x" * LARGE, [])


class Served:
    """An endpoint, and what it is to say."""

    def __init__(self) -> None:
        self.address = free_address()
        self.live: Reason = None
        self.ready: Reason = "the model is being loaded"
        self.registry = CollectorRegistry()
        self.counter = Counter("vllm:things", "Things.", registry=self.registry)
        self.endpoint = HttpEndpoint(self.address, lambda: self.live, lambda: self.ready, self.registry)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", port_of(self.address)), timeout=DEADLINE_S)
        connection.settimeout(DEADLINE_S)
        return connection


def read_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def is_dropped(connection: socket.socket) -> bool:
    """Wait until the endpoint has hung up."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    with served.endpoint:
        yield served


def test_health_is_told_as_json_with_the_reason(served: Served) -> None:
    live, ready = get(served.address, "/livez"), get(served.address, "/readyz")
    assert (live.status, live.json) == (200, {"status": "ok"})
    assert ready.status == 503
    assert ready.json == {"status": "unavailable", "reason": "the model is being loaded"}
    assert ready.headers["Content-Type"] == "application/json"
    served.live, served.ready = "it hangs", None
    assert get(served.address, "/livez").json["reason"] == "it hangs"
    assert get(served.address, "/readyz?verbose").status == 200


def test_openmetrics_for_who_prefers_them_and_prometheus_own_format_for_all_others(served: Served) -> None:
    served.counter.inc(3)
    preferred = get(served.address, "/metrics", headers={"accept": PROMETHEUS})
    other = get(served.address, "/metrics?why", headers={"Accept": "*/*"})
    assert other.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    # One sample a counter: no time stamp beside it.
    for family in (preferred.openmetrics["vllm:things"], other.metrics["vllm:things_total"]):
        (sample,) = family.samples
        assert (sample.name, sample.value) == ("vllm:things_total", 3)


@pytest.mark.parametrize("method", ["POST", "PUT", "OPTIONS"])
def test_nothing_but_get_and_head_is_taken(served: Served, method: str) -> None:
    answer = get(served.address, "/metrics", method)
    assert (answer.status, {*answer.headers["Allow"].split(", ")}) == (405, {"GET", "HEAD"})


@pytest.mark.parametrize("path", ["/", "/metrics/", "/livez2", "/favicon.ico", "//metrics"])
def test_another_path_is_not_found(served: Served, path: str) -> None:
    assert get(served.address, path).status == 404


def test_a_request_that_cannot_be_read_is_refused_and_one_that_breaks_off_harms_nobody(
    served: Served,
) -> None:
    with served.connect() as connection:
        connection.sendall(b"GET /met\xffrics HTTP/2.0\r\n\r\n")
        assert connection.recv(24) == b"HTTP/1.1 400 Bad Request"
    with served.connect() as connection:
        connection.sendall(b"GET /li")
    assert get(served.address, "/livez").status == 200


def test_silent_clients_keep_nobody_out(served: Served) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(served.connect()) for _ in range(MAX_WATCHERS + 1)]
        assert get(served.address, "/livez").status == 200
        assert is_dropped(silent[0])


@pytest.mark.parametrize(
    "words", [b"", b"GET /metrics HTTP/1.1\r\n", ANSWERED + b"GET /livez HT"], ids=["", "head", "second head"]
)
def test_a_silent_client_is_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.05)
    served = Served()
    with served.endpoint, served.connect() as connection:
        connection.sendall(words)
        told = read_all(connection)
        assert b" 408 " not in told
        assert (b" 200 " in told) == words.startswith(ANSWERED)


def test_a_client_that_does_not_read_keeps_nobody_waiting_and_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "STALL_S", 0.5)
    served = Served()
    served.registry.register(Large())
    with served.endpoint, served.connect() as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
        assert get(served.address, "/livez").status == 200
        wait_until(lambda: not served.endpoint.places.taken)
        assert len(read_all(connection)) < LARGE


def test_a_metric_that_cannot_be_read_is_told_and_health_is_still_answered(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    broken = threading.Event()

    class Broken(Collector):
        def collect(self) -> Iterator[Metric]:
            if broken.is_set():
                raise ZeroDivisionError("no such number")
            return iter(())

    served.registry.register(Broken())
    broken.set()
    assert get(served.address, "/metrics").status == 500
    wait_until(lambda: "no such number" in caplog.text)
    assert get(served.address, "/livez").status == 200


def test_an_address_in_use_is_named(served: Served) -> None:
    with pytest.raises(AddressInUseError, match=f"{served.address} is in use: is another OmniRelay"):
        HttpEndpoint(served.address, lambda: None, lambda: None)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_cannot_be_used_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on tcp://{host}:5572"):
        HttpEndpoint(f"tcp://{host}:5572", lambda: None, lambda: None)


@pytest.mark.parametrize("host", ["*", "127.0.0.1", "localhost", "[::1]"])
def test_every_way_to_write_a_host_is_understood(host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    port = port_of(free_address())
    with HttpEndpoint(f"tcp://{host}:{port}", lambda: None, lambda: None):
        asked = host if "::" in host else "127.0.0.1"
        assert get(f"tcp://{asked}:{port}", "/livez").status == 200


def test_closing_frees_the_address_and_drops_who_is_there(served: Served) -> None:
    with served.connect() as connection:
        get(served.address, "/livez")
        served.endpoint.close()
        assert is_dropped(connection)
        with HttpEndpoint(served.address, lambda: None, lambda: None):
            assert get(served.address, "/livez").status == 200


def test_scrapes_at_once_all_come_back(served: Served) -> None:
    served.registry.register(Large())
    sizes: list[int] = []

    def scrape() -> None:
        sizes.append(len(get(served.address, "/metrics").body))

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(sizes) == 3
    assert len(set(sizes)) == 1
