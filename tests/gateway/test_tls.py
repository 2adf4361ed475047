"""A gateway that speaks TLS, over both of its ways in, and clients that believe it."""

import asyncio
import base64
import json
import ssl
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from omnirelay import AsyncClient, Client
from omnirelay.cli.main import main
from omnirelay.errors import ConfigError, GatewayUnreachableError
from omnirelay.protocol import parse_tcp
from ops.doctor.access import check_access
from ops.launcher import Stack, running
from ops.target import own_target
from shared.config import Config, load_config
from tests.gateway.bench import Bench, Configure, Output, Patch, bench, run
from tests.gateway.guarded import CHAT, KEY, OTHER, serving
from tests.gateway.http_bench import HI, MODEL, http_bench, http_gateway
from tests.gateway.https_server import Authority

DAY = timedelta(days=1)


class Certified:
    """A gateway's certificate, its authority, and the configuration that names them."""

    def __init__(self, folder: Path, begins: timedelta = -DAY, ends: timedelta = 60 * DAY) -> None:
        folder.mkdir(exist_ok=True)
        host = "127.0.0.1"
        authority = Authority(folder, begins=begins, ends=ends)
        authority.serving(host)
        self.pem = folder / f"{host}.pem"
        self.pem.chmod(0o600)
        self.ca = folder / "ca.pem"
        self.ca.write_text(ssl.DER_cert_to_PEM_cert(authority.der))
        self.config = {"certificate": str(self.pem), "key": str(self.pem)}


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    return Certified(tmp_path)


def tls_address(b: Bench) -> str:
    return b.listen.replace("tcp:", "tls:")


async def test_tcp_clients_speak_tls(configure: Configure, certified: Certified, keys: str) -> None:
    config = configure({"tls": certified.config, "api_keys": keys})
    async with bench(config) as b, serving(b):
        async with AsyncClient(tls_address(b), KEY, certified.ca) as client:
            assert (await client.chat("Hi").result()).text == "Hello"
            # Large both ways.
            picture = bytes(2**22)
            await client.chat(images=[picture]).result()
            assert len(b.stages.requests[-1].media[0].data.view) == 2**22
        with pytest.raises(GatewayUnreachableError, match="was rejected"):
            await AsyncClient(tls_address(b), KEY).connect()
        hint = f"closed the connection without an answer; if it speaks TLS, use {tls_address(b)}$"
        with pytest.raises(GatewayUnreachableError, match=hint):
            await AsyncClient(b.listen, KEY).connect()
        with pytest.raises(GatewayUnreachableError, match=hint):
            await asyncio.to_thread(Client, b.listen, KEY)
        own = own_target(config)
        assert own.addresses == (tls_address(b),)
        assert (await own.status()).ready

        def plainly() -> None:
            with Client(tls_address(b), KEY, str(certified.ca)) as client:
                assert client.chat("Hi", speech=False).result().text == "Hello"

        await asyncio.to_thread(plainly)


async def test_http_and_websockets_speak_tls(configure: Configure, certified: Certified) -> None:
    async with http_bench(configure(http_gateway(tls=certified.config))) as b, serving(b):
        trusting = ssl.create_default_context(cafile=certified.ca)
        url = b.url.replace("http:", "https:")
        async with httpx.AsyncClient(base_url=url, verify=trusting) as http:
            answer = await http.post(CHAT, json={"model": MODEL, "messages": HI})
            assert answer.json()["choices"][0]["message"]["content"] == "Hello"
            body = {"model": MODEL, "messages": HI, "stream": True}
            async with http.stream("POST", CHAT, json=body) as stream:
                assert [line async for line in stream.aiter_lines()][-2] == "data: [DONE]"
            assert (await http.get("/readyz")).status_code == 200
        socket_url = url.replace("https:", "wss:").rstrip("/") + "/v1/realtime"
        async with connect(socket_url, ssl=trusting) as socket:
            assert json.loads(await socket.recv())["type"] == "session.created"
            audio = base64.b64encode(bytes(2**20)).decode()
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
            await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
            assert json.loads(await socket.recv())["type"] == "input_audio_buffer.committed"
        with pytest.raises(httpx.HTTPError):
            await b.http.get("/readyz")


@pytest.mark.parametrize("way", ["listen", "http"])
async def test_old_versions_and_slow_handshakes_are_refused(
    configure: Configure, certified: Certified, monkeypatch: Patch, way: str
) -> None:
    monkeypatch.setattr("gateway.access.tls.HANDSHAKE_S", 0.3)

    async with http_bench(configure(http_gateway(tls=certified.config))) as b, serving(b):
        host, port = parse_tcp(getattr(b.config.gateway, way))
        old = ssl.create_default_context(cafile=certified.ca)
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            old.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(host, port, ssl=old)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"\x16\x03\x01")
        async with asyncio.timeout(60):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        async with AsyncClient(tls_address(b), None, certified.ca) as client:
            assert (await client.chat("Hi", speech=False).result()).text == "Hello"


def test_keys_that_others_may_read_and_files_that_are_no_certificates_are_refused(
    configure: Configure, certified: Certified, tmp_path: Path
) -> None:
    config = configure({"tls": certified.config})
    for mode in (0o640, 0o604, 0o620):
        certified.pem.chmod(mode)
        does_not_start(config, "is accessible to others: chmod 600")
    certified.pem.write_text("no certificate")
    certified.pem.chmod(0o600)
    does_not_start(config, "are no certificate and its key in PEM")
    certified.pem.unlink()
    does_not_start(config, "cannot read")
    with pytest.raises(ConfigError, match="cannot read the authority's certificate"):
        run(AsyncClient("tls://127.0.0.1:1", ca=tmp_path / "missing").connect())
    with pytest.raises(ValueError, match="certificate and key go together"):
        configure({"tls": {"key": "x"}})


def does_not_start(config: Config, match: str) -> None:
    async def scenario() -> None:
        async with bench(config, ready=False):
            raise AssertionError("it must not start")

    with pytest.raises(ConfigError, match=match):
        run(scenario())


def test_a_client_of_another_protocol_is_told_in_one_line() -> None:
    for address in ("https://127.0.0.1:1", "tls://127.0.0.1", "tls://:5"):
        with pytest.raises(ConfigError, match="tcp://HOST:PORT or tls://HOST:PORT"):
            run(AsyncClient(address).connect())


async def test_tls_at_a_gateway_that_speaks_none_is_said(tcp: Bench) -> None:
    with pytest.raises(GatewayUnreachableError, match=f"without TLS, use {tcp.listen}$"):
        await AsyncClient(tls_address(tcp)).connect()


async def test_the_commands_send_the_key_and_believe_the_authority(
    configure: Configure, certified: Certified, keys: str, tmp_path: Path, capsys: Output, monkeypatch: Patch
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")

    async def command(*arguments: str) -> tuple[int, Any]:
        status = await asyncio.to_thread(main, list(arguments))
        return status, capsys.readouterr()

    async with bench(configure({"tls": certified.config, "api_keys": keys})) as b, serving(b):
        there = ["--gateway", tls_address(b), "--ca", str(certified.ca)]
        ask = ["chat", "Hi", "--text-only", "--no-play", *there]
        status, told = await command(*ask, "--api-key-file", str(key_file))
        assert (status, told.out.splitlines()[0]) == (0, "Hello")
        status, told = await command(*ask)
        assert status == 1
        assert "unauthenticated" in told.err
        status, told = await command("status", "--gateway", b.listen)
        assert (status, f"use {tls_address(b)}\n" in told.err) == (1, True)
        monkeypatch.setenv("OMNIRELAY_API_KEY", OTHER)
        assert (await command(*ask))[0] == 0
        assert (await command("status", *there))[0] == 0
        monkeypatch.setenv("OMNIRELAY_API_KEY", "wrong")
        status, told = await command("status", *there)
        assert status == 1
        assert "wrong" not in told.err
        key_file.write_text("two words\n")
        status, told = await command(*ask, "--api-key-file", str(key_file))
        assert (status, "must hold an API key and nothing else" in told.err) == (1, True)
        assert (await command(*ask, "--api-key-file", str(tmp_path / "missing")))[0] == 1


async def test_the_launcher_needs_neither_a_key_nor_an_authority(
    place: Path, certified: Certified, keys: str, monkeypatch: Patch
) -> None:
    for name, value in {
        "API_KEYS": keys,
        "TLS__CERTIFICATE": str(certified.pem),
        "TLS__KEY": str(certified.pem),
    }.items():
        monkeypatch.setenv(f"OMNIRELAY_GATEWAY__{name}", value)
    stack = Stack(load_config(), None, lambda *_: None)

    async with running(stack) as report:
        assert report.ready


def test_the_doctor_looks_at_keys_and_certificate(
    configure: Configure, certified: Certified, keys: str, tmp_path: Path
) -> None:
    def levels(**gateway: object) -> list[tuple[str, str]]:
        found = [(each.check, each.level) for each in check_access(configure(gateway))]
        return [each for each in found if each[0] != "clients"]

    assert levels() == []
    assert levels(tls=certified.config, api_keys=keys) == [("api-keys", "ok"), ("tls", "ok")]
    (tmp_path / "empty").touch(0o600)
    assert levels(api_keys=str(tmp_path / "empty")) == [("api-keys", "problem")]
    certified.pem.chmod(0o644)
    wrong = levels(tls=certified.config, api_keys=str(tmp_path / "missing"))
    assert wrong == [("api-keys", "problem"), ("tls", "problem")]
    certified.pem.chmod(0o600)
    addresses = {"listen": "tcp://0.0.0.0:5555", "http": "tcp://0.0.0.0:8000"}
    told = [each.what for each in check_access(configure(addresses)) if each.level == "warning"]
    assert [("no key" in each, "no TLS" in each) for each in told] == [(True, False), (False, True)]
    guarded = configure({**addresses, "tls": certified.config, "api_keys": keys})
    assert {each.level for each in check_access(guarded)} == {"ok"}
