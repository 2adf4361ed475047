"""Ephemeral keys: what they open and for how long, and what they may not."""

import gc
import json
import time
import tracemalloc
from typing import Any

import openai
import pytest
from websockets.exceptions import InvalidStatus

from gateway.access.ephemeral import PREFIX
from tests.gateway.bench import Configure
from tests.gateway.guarded import BEARER, CHAT, KEY, keys_file
from tests.gateway.http_bench import HI, MODEL, HttpBench, http_bench, http_gateway, speaking
from tests.gateway.test_http_realtime import ANSWER, CHUNKS, HELLO, ask, idle

URL = "/v1/realtime/client_secrets"
SESSION = {"type": "realtime", "instructions": "Be brief.", "audio": {"output": {"voice": "Ethan"}}}


async def made(b: HttpBench, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    answer = await b.http.post(URL, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    values: dict[str, Any] = answer.json()
    return values


async def opened(b: HttpBench, key: str) -> Any:
    """The settings of a session that is opened with a key."""
    async with client_of(b, key).realtime.connect(model=MODEL) as connection:
        return (await connection.recv()).session  # type: ignore[union-attr]


def client_of(b: HttpBench, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{b.url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    )


async def refused(b: HttpBench, key: str) -> int:
    """The status of a session that is refused."""
    with pytest.raises(InvalidStatus) as error:
        await opened(b, key)
    return error.value.response.status_code


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_key_opens_sessions_as_they_were_ordered(
    configure: Configure, keys: str, keyed: bool
) -> None:
    config = configure(http_gateway(**({"api_keys": keys} if keyed else {})))
    async with http_bench(config) as b, speaking(b, ANSWER, CHUNKS):
        before = time.time()
        secret = await made(b, BEARER if keyed else None, session=SESSION)
        assert secret["value"].startswith(PREFIX)
        assert 599 <= secret["expires_at"] - before <= 602
        assert secret["session"]["instructions"] == "Be brief."
        for _ in range(2):
            session = await opened(b, secret["value"])
            assert session.instructions == "Be brief."
            assert session.audio.output.voice == "Ethan"
        async with client_of(b, secret["value"]).realtime.connect(model=MODEL) as connection:
            await connection.recv()
            await connection.conversation.item.create(item=HELLO)
            assert (await ask(connection))[-1].response.status == "completed"
        if keyed:
            # Requests are those of the key that made it.
            assert b.process.access.keys.client(KEY).taken == 1
        assert b.process.gateway.held.total > 0


async def test_a_key_expires_and_its_memory_is_free(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.realtime.endpoint.SECOND_S", 0.03)

    async with http_bench(configure(http_gateway())) as b:
        secret = await made(b, session=SESSION, expires_after={"anchor": "created_at", "seconds": 10})
        assert b.process.gateway.held.total > 0
        assert "\nomnirelay_client_secrets 1.0\n" in (await b.http.get("/metrics")).text
        await idle(b)
        assert await refused(b, secret["value"]) == 401
        assert "\nomnirelay_client_secrets 0.0\n" in (await b.http.get("/metrics")).text


@pytest.mark.parametrize("keyed", [True, False])
async def test_what_a_key_does_not_open(configure: Configure, keys: str, keyed: bool) -> None:
    config = configure(http_gateway(**({"api_keys": keys} if keyed else {})))
    async with http_bench(config) as b:
        key = (await made(b, BEARER if keyed else None))["value"]
        bearer = {"Authorization": f"Bearer {key}"}
        for path, body in ((CHAT, {"model": MODEL, "messages": HI}), (URL, {})):
            answer = await b.http.post(path, json=body, headers=bearer)
            assert answer.status_code == 401
            assert "opens /v1/realtime" in answer.json()["error"]["message"]
        assert await refused(b, f"{key[:-1]}{'A' if key[-1] != 'A' else 'B'}") == 401
        assert await refused(b, PREFIX) == 401
        assert (await b.http.post(URL, json={})).status_code == (401 if keyed else 200)


async def test_a_key_takes_no_more_memory_than_was_reserved(configure: Configure) -> None:
    nested: dict[str, list[list[Any]]] = {"enum": [[] for _ in range(60_000)]}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": nested}}}
    body = {"session": {"tools": [tool]}}

    async with http_bench(configure(http_gateway())) as b:
        assert (await b.http.post(URL, json=body)).status_code == 200
        tracemalloc.start()
        try:
            assert (await b.http.post(URL, json=body)).status_code == 200
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


async def test_bounds(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.access.ephemeral.MAX_KEYS", 5)

    async with http_bench(configure(http_gateway())) as b:
        codes = [(await b.http.post(URL)).status_code for _ in range(6)]
        # One place is left for other clients.
        assert codes == [200] * 4 + [429] * 2
        large = await b.http.post(URL, json={"session": {"instructions": "x" * 2**18}})
        assert large.status_code == 413
