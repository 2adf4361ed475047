"""API keys and ephemeral ones: their file, the command that makes one, what a key opens and for how long."""

import errno
import gc
import json
import stat
import time
import tracemalloc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection
from websockets.exceptions import InvalidStatus

from gateway.access.access import open_doors
from gateway.access.account import UNREAD_OF_ONE, ClientAccount, Principal, Unread
from gateway.access.api_keys import EPHEMERAL_PREFIX, ApiKeys, KeyEntry, hash_of, new_key, read_keys
from gateway.fairness.quota import TokenBucket
from omnirelay.cli.main import main
from omnirelay.errors import (
    BusyError,
    ConfigError,
    SlowClientError,
    StandardOutputError,
    UnauthenticatedError,
)
from omnirelay.protocol import Hello
from shared.config import load_config
from tests.gateway.bench import BEARER, CHAT, KEY, Configure, Output, Patch, keys_file, written
from tests.gateway.http_bench import HI, MODEL, HttpBench, http_bench, http_gateway, speaking
from tests.gateway.realtime import ANSWER, CHUNKS, HELLO, ask, idle

SECRET = "omr_" + "s3cr3t" * 7


def test_a_key_is_known_by_its_hash_alone(tmp_path: Path) -> None:
    first, second = new_key(), new_key()
    assert first != second
    path = keys_file(tmp_path / "keys", alice={"key": first, "max_requests": 2}, bob={"key": second})
    assert first not in path.read_text()
    keys = ApiKeys(path)
    assert keys.needed
    assert keys.client(first).name == "key alice"
    assert keys.client(first) is keys.client(first)
    assert keys.client(second).limits.max_requests is None
    told = set()
    for wrong in (None, "", first[:-1], first + "x", f" {first}", "\udcff", hash_of(first)):
        with pytest.raises(UnauthenticatedError) as error:
            keys.client(wrong)
        told.add(str(error.value))
    assert len(told) == 1, "missing and wrong are told alike"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a\n", "must map names"),
        ("a: {sha256: abc}\n", "a: Expected `str` matching regex"),
        (f"a: {{sha256: {'a' * 64}, key: {SECRET}}}\n", "unknown field `key`"),
        (f"a: {SECRET}\n", "Expected `object`, got `str`"),
        (f"{SECRET}: 'oops\n", "is not YAML in line"),
        (f"? [{SECRET}]\n: 1\n", "is not YAML"),
        (f"{SECRET.upper()}: {{}}\n", "name 1 must match"),
        (f"a: {{sha256: {'a' * 64}, best_priority: -2000}}\n", "best_priority"),
        (f"a: {{sha256: {'a' * 64}, requests_per_second: 0}}\n", "requests_per_second"),
        (f"a: {{sha256: {'a' * 64}}}\na: {{sha256: {'b' * 64}}}\n", "names a key twice"),
        (f"a: {{sha256: {'a' * 64}}}\nb: {{sha256: {'a' * 64}}}\n", "one key under two names"),
    ],
)
def test_a_bad_file_is_refused_without_its_content(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.api_keys") as error:
        read_keys(written(tmp_path / "keys", text))
    assert problem in str(error.value)
    assert SECRET not in str(error.value)
    assert SECRET.upper() not in str(error.value)


def test_files_not_to_be_believed_are_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    with pytest.raises(ConfigError, match="is writable by others"):
        read_keys(written(tmp_path / "a", "", 0o620))
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "missing")
    (tmp_path / "b").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_keys(tmp_path / "b")
    monkeypatch.setattr("gateway.access.api_keys.MAX_KEYS", 1)
    two = "".join(f"k{number}: {{sha256: a{number:063}}}\n" for number in range(2))
    with pytest.raises(ConfigError, match="has 2 keys, at most 1"):
        read_keys(written(tmp_path / "c", two))
    monkeypatch.setattr("gateway.access.api_keys.MAX_FILE_BYTES", 10)
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        read_keys(tmp_path / "c")
    assert read_keys(written(tmp_path / "d", "")) == {}


def test_what_is_read_again_holds_from_then_on(tmp_path: Path) -> None:
    path = keys_file(
        tmp_path / "keys", kept={"key": "k"}, gone={"key": "g"}, turned={"key": "t"}, limited={"key": "l"}
    )
    keys = ApiKeys(path)
    kept, gone, turned, limited = (keys.client(each) for each in "kgtl")
    kept.open()
    keys_file(path, kept={"key": "k"}, turned={"key": "T"}, limited={"key": "l", "max_requests": 1})
    keys.take(keys.read())
    assert keys.client("k") is kept
    kept.open()
    assert kept.open_requests == 2
    for withdrawn in (gone, turned):
        with pytest.raises(UnauthenticatedError):
            withdrawn.open()
    assert keys.client("T") is not turned
    with pytest.raises(UnauthenticatedError):
        keys.client("g")
    limited.open()
    with pytest.raises(BusyError, match="may have 1 open requests"):
        limited.open()
    for nothing, why in (("broken: [", "is not YAML"), ("", r"holds no key.*omnirelay api-key")):
        path.write_text(nothing)
        with pytest.raises(ConfigError, match=why):
            keys.read()
    assert keys.client("k") is kept
    metrics = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in keys.collect()
        for sample in metric.samples
    }
    assert metrics["omnirelay_key_requests_total", "kept", "taken"] == 2
    assert metrics["omnirelay_key_requests_total", "limited", "busy"] == 1
    assert metrics["omnirelay_key_open_requests", "kept"] == 2
    assert not any("gone" in name for name in metrics)


def test_what_was_counted_of_a_key_is_counted_on_when_it_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def counted() -> dict[tuple[str, str], float]:
        requests, _ = keys.collect()
        return {(each.labels["key"], each.labels["outcome"]): each.value for each in requests.samples}

    keys = ApiKeys(keys_file(path, back={"key": "b", "max_requests": 1}, turned={"key": "t"}))
    keys.client("b").open()
    with pytest.raises(BusyError):
        keys.client("b").open()
    for _ in range(3):
        keys.client("t").open()
    keys_file(path, turned={"key": "T"})
    keys.take(keys.read())
    assert counted() == {("turned", "taken"): 3, ("turned", "busy"): 0}
    keys_file(path, back={"key": "b"}, turned={"key": "T"})
    keys.take(keys.read())
    keys.client("b").open()
    assert keys.client("b").open_requests == 1
    assert (counted()["back", "taken"], counted()["back", "busy"]) == (2, 1)


@settings(deadline=None)
@given(st.floats(0.1, 100), st.integers(1, 20), st.lists(st.floats(0, 2), max_size=100))
def test_a_bucket_gives_its_rate_and_burst(per_second: float, burst: int, pauses: list[float]) -> None:
    now = 0.0
    bucket = TokenBucket(per_second, burst, clock=lambda: now)
    taken = 0
    for pause in pauses:
        now += pause
        wait_s = bucket.wait_s()
        if wait_s == 0:
            bucket.take()
            taken += 1
        else:
            assert wait_s <= 1 / per_second + 1e-9
        assert taken <= burst + per_second * now + 1e-6
    now += bucket.wait_s() + 1e-6
    assert bucket.wait_s() == 0


def test_tokens_that_are_taken_in_advance_are_waited_for() -> None:
    bucket = TokenBucket(4.0, 30.0, clock=lambda: 0.0)
    assert bucket.wait_s(30) == 0
    bucket.take(30)
    assert bucket.wait_s(8) == 2


def test_while_all_leave_much_unread_only_who_reads_gets_more() -> None:
    unread = Unread(3 * UNREAD_OF_ONE)
    slow, slower, reader = (ClientAccount(n, 9, 100 * UNREAD_OF_ONE, Principal(n), unread) for n in "abc")
    slow.charge(UNREAD_OF_ONE + 1)
    slower.charge(2 * UNREAD_OF_ONE - 1)
    reader.charge(1000)
    with pytest.raises(SlowClientError, match=f"at most {UNREAD_OF_ONE} are buffered now"):
        slow.charge(1)
    slower.release(2 * UNREAD_OF_ONE - 1)
    slow.charge(1)
    assert unread.total == UNREAD_OF_ONE + 2 + 1000


def test_a_hello_does_not_show_its_key() -> None:
    assert "secret" not in repr(Hello(1, "x", "secret"))


def test_the_environments_key_is_no_key_of_the_configuration() -> None:
    assert load_config(environment={"OMNIRELAY_API_KEY": SECRET}) == load_config(environment={})


@pytest.mark.parametrize(
    ("gateway", "told"),
    [
        ({}, []),
        ({"listen": "tcp://0.0.0.0:5555"}, ["can use this gateway", "no TLS"]),
        ({"http": "tcp://example.org:80", "api_keys": "x"}, ["no TLS"]),
        ({"http": "tcp://[::]:80", "tls": {"certificate": "c", "key": "k"}}, ["can use this gateway"]),
        ({"listen": "tcp://localhost:1", "http": None}, []),
    ],
)
def test_what_others_may_use_or_read_is_told(gateway: dict[str, object], told: list[str]) -> None:
    config = load_config(environment={}).gateway.model_validate(gateway)
    found = open_doors(config)
    assert len(found) == len(told)
    for words, line in zip(told, found, strict=True):
        assert words in line


def test_the_command_makes_a_key_that_is_known(tmp_path: Path, capsys: Output, monkeypatch: Patch) -> None:
    path = tmp_path / "folder" / "keys.yaml"
    monkeypatch.setenv("OMNIRELAY_GATEWAY__API_KEYS", str(path))
    assert main(["api-key", "alice"]) == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith("omr_")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # For the group of a gateway that is another user's.
    path.chmod(0o640)
    path.write_text("# people\n" + path.read_text().rstrip("\n"))
    limits = ["--requests-per-second", "2", "--burst", "3", "--max-requests", "4"]
    assert main(["api-key", "bob", *limits, "--request-bytes", "5", "--best-priority", "6"]) == 0
    told = capsys.readouterr()
    assert told.out.strip() not in path.read_text() + told.err
    assert path.read_text().startswith("# people\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    entries = read_keys(path)
    assert entries["alice"] == KeyEntry(sha256=hash_of(key))
    assert entries["bob"] == KeyEntry(
        sha256=hash_of(told.out.strip()),
        requests_per_second=2,
        burst=3,
        max_requests=4,
        request_bytes=5,
        best_priority=6,
    )
    before = path.read_text()
    for arguments, why in (
        (["alice"], "has a key 'alice' already"),
        (["Not a name"], "must match"),
        (["carol", "--burst", "0"], "invalid limits for 'carol'"),
        (["carol", "--file", "/dev/null/keys"], "cannot write"),
    ):
        assert main(["api-key", *arguments]) == 1
        assert why in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("ops.api_key.say", Mock(side_effect=[StandardOutputError("a full disk"), None]))
        assert main(["api-key", "carol"]) == 1
        assert path.read_text() == before
        assert [each.name for each in path.parent.iterdir()] == ["keys.yaml"]
        patch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.EBADF, "as on NFS")))
        patch.setattr("sys.stderr", Mock(write=Mock(side_effect=OSError), isatty=lambda: False))
        assert main(["api-key", "dora"]) == 0
    with ThreadPoolExecutor(8) as at_once:
        assert not any(at_once.map(lambda number: main(["api-key", f"key-{number}"]), range(16)))
    assert len(read_keys(path)) == 3 + 16
    written(path, "{}")
    assert main(["api-key", "carol"]) == 1
    assert "does not allow an entry to be appended" in capsys.readouterr().err
    monkeypatch.delenv("OMNIRELAY_GATEWAY__API_KEYS")
    assert main(["api-key", "carol"]) == 1
    assert "names no file of keys" in capsys.readouterr().err


URL = "/v1/realtime/client_secrets"
SESSION = {"type": "realtime", "instructions": "Be brief.", "audio": {"output": {"voice": "Ethan"}}}


async def made(b: HttpBench, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    answer = await b.http.post(URL, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    values: dict[str, Any] = answer.json()
    return values


@asynccontextmanager
async def opened(b: HttpBench, key: str) -> AsyncIterator[tuple[Connection, Any]]:
    """A session that is opened with a key, and its settings."""
    client = b.ai.with_options(api_key=key)
    async with client.realtime.connect(model=MODEL) as connection:
        yield connection, (await connection.recv()).session  # type: ignore[union-attr]


async def refused(b: HttpBench, key: str) -> int:
    """The status of a session that is refused."""
    with pytest.raises(InvalidStatus) as error:
        async with opened(b, key):
            pass
    return error.value.response.status_code


@pytest.fixture(params=[True, False], ids=["keyed", "open"])
def keyed(request: pytest.FixtureRequest) -> bool:
    """Whether the gateway asks for keys."""
    return bool(request.param)


@pytest.fixture
async def b(configure: Configure, keys: str, keyed: bool) -> AsyncIterator[HttpBench]:
    config = configure(http_gateway(api_keys=keys if keyed else None))
    async with http_bench(config) as b, speaking(b, ANSWER, CHUNKS):
        yield b


async def test_a_key_opens_sessions_as_ordered(b: HttpBench, keyed: bool) -> None:
    before = time.time()
    secret = await made(b, BEARER if keyed else None, session=SESSION)
    assert secret["value"].startswith(EPHEMERAL_PREFIX)
    assert before - 1 <= secret["expires_at"] - 600 <= time.time()
    assert secret["session"]["instructions"] == "Be brief."
    for _ in range(2):
        async with opened(b, secret["value"]) as (connection, session):
            assert (session.instructions, session.audio.output.voice) == ("Be brief.", "Ethan")
            await connection.conversation.item.create(item=HELLO)
            assert (await ask(connection))[-1].response.status == "completed"
    if keyed:
        # Requests are those of the key that made it.
        assert b.process.access.keys.client(KEY).taken == 2
    assert b.process.gateway.held.total > 0


async def test_a_key_expires_and_its_memory_is_free(web: HttpBench, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.http.realtime.endpoint.SECOND_S", 0.1)

    secret = await made(web, session=SESSION, expires_after={"anchor": "created_at", "seconds": 10})
    assert web.process.gateway.held.total > 0
    assert "\nomnirelay_client_secrets 1.0\n" in (await web.http.get("/metrics")).text
    await idle(web)
    assert await refused(web, secret["value"]) == 401
    assert "\nomnirelay_client_secrets 0.0\n" in (await web.http.get("/metrics")).text


async def test_what_a_key_does_not_open(b: HttpBench, keyed: bool) -> None:
    key = (await made(b, BEARER if keyed else None))["value"]
    bearer = {"Authorization": f"Bearer {key}"}
    for path, body in ((CHAT, {"model": MODEL, "messages": HI}), (URL, {})):
        answer = await b.http.post(path, json=body, headers=bearer)
        assert answer.status_code == 401
        assert "opens /v1/realtime" in answer.json()["error"]["message"]
    assert await refused(b, f"{key[:-1]}{'A' if key[-1] != 'A' else 'B'}") == 401
    assert await refused(b, EPHEMERAL_PREFIX) == 401
    assert (await b.http.post(URL, json={})).status_code == (401 if keyed else 200)


async def test_a_key_takes_no_more_memory_than_was_reserved(web: HttpBench) -> None:
    nested: dict[str, list[list[Any]]] = {"enum": [[] for _ in range(20_000)]}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": nested}}}
    body = {"session": {"tools": [tool]}}
    assert (await web.http.post(URL, json=body)).status_code == 200
    tracemalloc.start()
    try:
        assert (await web.http.post(URL, json=body)).status_code == 200
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 3 * len(json.dumps(body))


async def test_a_key_ends_with_the_key_that_made_it(configure: Configure, tmp_path: Any) -> None:
    alice = {"key": KEY}
    file = keys_file(tmp_path / "keys.yaml", alice=dict(alice))
    async with http_bench(configure(http_gateway(api_keys=str(file)))) as b:
        key = (await made(b, BEARER))["value"]
        keys_file(file, bob={"key": "omr_bobs"})
        b.process.access.reload()
        assert await refused(b, key) == 401


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"expires_after": {"seconds": 9}}, "expires_after.seconds"),
        ({"expires_after": {"seconds": 7201}}, "expires_after.seconds"),
        ({"expires_after": {"anchor": "now"}}, "expires_after.anchor"),
        ({"session": []}, "session"),
        ({"session": {"audio": {"output": {"voice": "Nobody"}}}}, "session.audio.output.voice"),
        ({"session": {"speed": 3}}, None),
        ({"more": 1}, "more"),
    ],
)
async def test_requests_that_are_refused(web: HttpBench, body: dict[str, Any], param: str | None) -> None:
    answer = await web.http.post(URL, json=body)
    assert answer.status_code == 400, answer.text
    assert param is None or answer.json()["error"]["param"] == param
    assert web.process.gateway.held.total == 0


async def test_bounds(configure: Configure, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.access.api_keys.MAX_EPHEMERAL", 5)
    async with http_bench(configure(http_gateway())) as b:
        codes = [(await b.http.post(URL)).status_code for _ in range(6)]
        # One place is left for other clients.
        assert codes == [200] * 4 + [429] * 2
        large = await b.http.post(URL, json={"session": {"instructions": "x" * 2**18}})
        assert large.status_code == 413
