"""A gateway that asks for keys, over both of its ways in."""

import asyncio
import json
import logging
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import httpx
import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from gateway.access.access import Access
from gateway.access.api_keys import hash_of
from gateway.http.realtime.endpoint import SUBPROTOCOL
from omnirelay import AsyncClient
from omnirelay.errors import BusyError, InvalidRequestError, MessageError, UnauthenticatedError
from omnirelay.protocol import PIECE_BYTES, PROTOCOL_VERSION, Hello, Ping, Pong
from tests.gateway.bench import (
    BEARER,
    CHAT,
    KEY,
    OTHER,
    Configure,
    Log,
    Patch,
    RawClient,
    bench,
    fails,
    keys_file,
    run,
    serving,
    submit,
)
from tests.gateway.bench import HI as HI_TCP
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HI, MODEL, http_bench, http_gateway
from tests.gateway.test_processes import end, read_until, start
from tests.support.ports import free_ports


async def test_over_tcp_only_a_known_key_opens_more_than_the_status(configure: Configure, keys: str) -> None:
    async with bench(configure({"api_keys": keys})) as b, serving(b):
        async with AsyncClient(b.listen, KEY) as client:
            assert (await client.chat("Hi", speech=False).result()).text == "Hello"
        async with AsyncClient(b.listen) as nobody:
            assert (await nobody.status()).ready
            await fails(nobody.chat("Hi", speech=False), UnauthenticatedError, "missing or invalid API key")
            # Nothing large is read of somebody unknown, in pieces or in one.
            await fails(
                nobody.chat("x" * 2 * PIECE_BYTES, speech=False),
                UnauthenticatedError,
                "missing or invalid API key",
            )
        raw = await RawClient.connect(b)
        raw.writer.write((2 * PIECE_BYTES).to_bytes(4, "big"))
        assert (await raw.refused()).code == "unauthenticated"
        assert b.process._server._uploads.used == 0
        with pytest.raises(UnauthenticatedError):
            await AsyncClient(b.listen, KEY + "x").connect()
        assert len(b.stages.requests) == 1
        outcomes = b.process.gateway.metrics.registry
        assert outcomes.get_sample_value("omnirelay_requests_total", {"outcome": "failed"}) == 0
        assert outcomes.get_sample_value("omnirelay_requests_total", {"outcome": "refused"}) == 1
        assert b.process.status().refused["unauthenticated"] == 2


async def test_who_says_no_key_may_not_stay(configure: Configure, keys: str, monkeypatch: Patch) -> None:
    async with bench(configure({"api_keys": keys})) as b:
        raw = await RawClient.connect(b)
        known = await RawClient.connect(b, key=KEY)
        # For what comes after the next message.
        monkeypatch.setattr("gateway.tcp.connection.HELLO_TIMEOUT_S", 0.2)
        for each in (known, raw):
            each.say(Ping())
            assert isinstance(await each.hear(), Pong)
        await raw.refused()
        assert await raw.closed()
        known.say(submit(1, HI_TCP))
        assert await known.accepted() == 1


async def test_over_http_what_is_not_open_needs_a_known_key(configure: Configure, keys: str) -> None:
    async with http_bench(configure(http_gateway(api_keys=keys))) as b, serving(b):
        for path in ("/", "/page/app.js", "/livez", "/readyz", "/health", "/version", "/docs"):
            assert (await b.http.get(path)).status_code == 200
        answers = set()
        for headers in (
            {},
            {"Authorization": "Bearer nobody"},
            {"Authorization": f"Basic {KEY}"},
            {"Authorization": KEY},
            [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {OTHER}")],
        ):
            for path in ("/v1/models", "/metrics", "/v1/requests/x", "/nowhere", "/page"):
                answer = await b.http.get(path, headers=headers)
                answers.add((answer.status_code, answer.text, answer.headers["www-authenticate"]))
            posted = await b.http.post(CHAT, headers=headers, json={"model": MODEL, "messages": HI})
            answers.add((posted.status_code, posted.text, posted.headers["www-authenticate"]))
        assert len(answers) == 1, "what is wrong is told to nobody"
        status, text, how = answers.pop()
        error = json.loads(text)["error"]
        assert (status, how, error["code"]) == (401, "Bearer", "unauthenticated")
        assert error["type"] == "authentication_error"
        metrics = (await b.http.get("/metrics", headers=BEARER)).text
        assert 'omnirelay_client_errors_total{code="unauthenticated",interface="http"} 30.0' in metrics
        assert KEY not in metrics
        async with openai.AsyncOpenAI(base_url=f"{b.url}/v1", api_key=KEY, max_retries=0) as ai:
            done = await ai.chat.completions.create(model=MODEL, messages=HI)
            assert done.choices[0].message.content == "Hello"
        with pytest.raises(openai.AuthenticationError):
            await b.ai.models.list()
        metrics = (await b.http.get("/metrics", headers=BEARER)).text
        assert 'omnirelay_key_requests_total{key="alice",outcome="taken"} 1.0' in metrics


async def test_a_large_body_is_not_read_of_somebody_unknown(configure: Configure, keys: str) -> None:
    async with http_bench(configure(http_gateway(api_keys=keys))) as b:
        reader, writer = await asyncio.open_connection(*b.address)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**26}\r\n\r\n"
        writer.write(head.encode())
        assert b" 401 " in await reader.readline()
        assert b.process._server._uploads.used == 0
        writer.close()


async def test_a_session_takes_a_header_or_a_browsers_subprotocol(configure: Configure, keys: str) -> None:
    async with http_bench(configure(http_gateway(api_keys=keys))) as b:
        url = b.url.replace("http:", "ws:").rstrip("/") + "/v1/realtime"
        offered = [SUBPROTOCOL, f"openai-insecure-api-key.{KEY}", "openai-beta.realtime-v1"]
        async with connect(url, additional_headers=BEARER) as socket:
            assert json.loads(await socket.recv())["type"] == "session.created"
        async with connect(url, subprotocols=[Subprotocol(each) for each in offered]) as socket:
            assert socket.subprotocol == SUBPROTOCOL
            assert json.loads(await socket.recv())["type"] == "session.created"
        for wrong in (None, [Subprotocol("openai-insecure-api-key.x")]):
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, subprotocols=wrong)
            assert refused.value.response.status_code == 401


async def test_what_a_key_may_do_holds_over_all_its_connections(configure: Configure, tmp_path: Path) -> None:
    alice = {"key": KEY, "max_requests": 2, "request_bytes": 2000, "best_priority": 3}
    bob = {"key": OTHER, "requests_per_second": 0.01, "burst": 2}
    path = keys_file(tmp_path / "k", alice=alice, bob=bob)

    async with http_bench(configure(http_gateway(api_keys=str(path)))) as b:
        async with AsyncClient(b.listen, KEY) as one, AsyncClient(b.listen, KEY) as two:
            first = one.chat("Hi", speech=False, priority=-100)
            assert (await b.stages.request(0)).priority == 3
            _second = two.chat("Hi", speech=False, priority=7)
            assert (await b.stages.request(1)).priority == 7
            third = two.chat("Hi", speech=False)
            busy = await fails(third, BusyError, "may have 2 open requests")
            assert busy.retry_after_ms > 0
            answer = await b.http.post(CHAT, headers=BEARER, json={"model": MODEL, "messages": HI})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.headers["retry-after-ms"] == "1000"
            with pytest.raises(InvalidRequestError, match="2000"):
                one.chat("x" * 3000)
            await b.stages.answer(b.stages.requests[0], b.encode("Hello"))
            assert (await first.result()).text == "Hello"
        long = [{"role": "user", "content": "x" * 3000}]
        await until(lambda: b.counts["cancelled"] == 1)
        answer = await b.http.post(CHAT, headers=BEARER, json={"model": MODEL, "messages": long})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        async with AsyncClient(b.listen, OTHER) as other:
            _his = [other.chat("Hi", speech=False) for _ in range(2)]
            await b.stages.request(3)
            late = await fails(other.chat("Hi", speech=False), BusyError, r"0\.01 requests a second")
            assert 90_000 < late.retry_after_ms <= 100_000


@pytest.mark.parametrize(("keyed", "shared"), [(True, False), (True, True), (False, False)])
async def test_each_key_has_a_cache_of_its_own(
    configure: Configure, keys: str, keyed: bool, shared: bool
) -> None:
    settings = http_gateway(api_keys=keys if keyed else None, share_prefix_cache=shared)
    async with http_bench(configure(settings)) as b, serving(b):
        for key in (KEY, OTHER):
            async with AsyncClient(b.listen, key) as client:
                await client.chat("Hi", speech=False).result()
        await b.http.post(CHAT, headers=BEARER, json={"model": MODEL, "messages": HI})
        alice, bob, by_http = (request.cache_salt for request in b.stages.requests)
        if shared or not keyed:
            assert {alice, bob, by_http} == {None}
        else:
            assert alice == by_http
            assert None not in {alice, bob}
            assert alice != bob


async def test_the_page_of_another_origin_may_ask_what_it_may_send(configure: Configure, keys: str) -> None:
    origin = "https://chat.example.com"
    async with http_bench(configure(http_gateway(api_keys=keys, http_origins=[origin]))) as b:
        asks = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        answer = await b.http.options(CHAT, headers=asks)
        assert answer.status_code == 200
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        refused = await b.http.get("/v1/models", headers={"Origin": origin})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)


# --- nothing secret in logs --------------------------------------------------


def test_at_debug_no_log_holds_a_key(place: Path, keys: str, monkeypatch: Patch) -> None:
    """The real process, with all that libraries say, is asked in every way, with right and wrong keys."""
    monkeypatch.setenv("OMNIRELAY_GATEWAY__API_KEYS", keys)
    monkeypatch.setenv("OMNIRELAY_LOG_LEVEL", "debug")
    monkeypatch.setenv("OMNIRELAY_API_KEY", OTHER)
    http = os.environ["OMNIRELAY_GATEWAY__HTTP"].replace("tcp:", "http:")
    wrong = ("omr_wrong-but-close", "plain-words-of-somebody")

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=http, timeout=60) as client:
            for key in (KEY, *wrong):
                headers = {"Authorization": f"Bearer {key}"}
                await client.get("/v1/models", headers=headers)
                await client.post(CHAT, headers=headers, json={"model": MODEL, "messages": HI})
                url = http.replace("http:", "ws:") + "/v1/realtime"
                offered = [Subprotocol(f"openai-insecure-api-key.{key}")]
                for header, protocols in ((headers, None), (None, offered)):
                    with nullcontext() if key == KEY else pytest.raises(InvalidStatus):
                        async with connect(url, additional_headers=header, subprotocols=protocols) as socket:
                            await socket.recv()
        for key in (KEY, wrong[0]):
            with nullcontext() if key == KEY else pytest.raises(UnauthenticatedError):
                async with AsyncClient(os.environ["OMNIRELAY_GATEWAY__LISTEN"], key) as tcp:
                    await tcp.status()

    with start("gateway") as process:
        lines = read_until(process, "listening on")
        run(ask())
        process.send_signal(signal.SIGHUP)
        lines += read_until(process, "reloaded")
        text = "".join(lines) + end(process)
    assert [word for word in ("DEBUG", " 200 ", " 401 ") if word not in text] == []
    secrets = (KEY, OTHER, *wrong, KEY.removeprefix("omr_"), hash_of(KEY))
    assert [word for word in ("ERROR", *secrets) if word in text] == []


def test_a_gateway_open_to_others_says_so(configure: Configure, keys: str, caplog: Log) -> None:
    for gateway, told in (({}, 2), ({"api_keys": keys}, 1)):
        config = configure({**gateway, "listen": f"tcp://0.0.0.0:{free_ports(1)[0]}"})
        caplog.clear()
        with caplog.at_level(logging.WARNING, "gateway.access.access"):
            Access(config).warn()
        assert len([each for each in caplog.messages if "gateway.listen" in each]) == told


async def test_bad_messages_are_still_told_as_such(configure: Configure, keys: str) -> None:
    async with bench(configure({"api_keys": keys})) as b:
        raw = await RawClient.connect(b, greet=False)
        raw.say(Hello(PROTOCOL_VERSION, key="x" * 300))
        heard = await raw.refused()
        assert heard.code == MessageError.code
        assert "xxx" not in heard.message
