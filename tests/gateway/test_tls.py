"""A gateway that speaks TLS, over both of its ways in; its certificate: renewed, out of date, not its own."""

import asyncio
import base64
import json
import logging
import re
import signal
import ssl
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from websockets.asyncio.client import connect

from gateway.access.certificate import read_certificate
from omnirelay import AsyncClient, Client
from omnirelay.cli.main import main
from omnirelay.errors import ConfigError, GatewayUnreachableError, UnauthenticatedError
from omnirelay.protocol import parse_tcp
from ops.doctor import network
from ops.doctor.access import check_access
from ops.target import own_target
from shared.config import Config, TlsConfig
from tests.gateway.bench import (
    CHAT,
    KEY,
    OTHER,
    Bench,
    Configure,
    Log,
    Output,
    Patch,
    bench,
    keys_file,
    serving,
)
from tests.gateway.http_bench import HI, MODEL, http_bench, http_gateway
from tests.gateway.https_server import Authority
from tests.gateway.test_processes import end, read_until, start

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
        async with httpx.AsyncClient(base_url=url, verify=trusting, timeout=60) as http:
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
    monkeypatch.setattr("gateway.access.tls.HANDSHAKE_S", 1.0)

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


async def test_keys_that_others_may_read_and_files_that_are_no_certificates_are_refused(
    configure: Configure, certified: Certified, tmp_path: Path
) -> None:
    config = configure({"tls": certified.config})
    for mode in (0o640, 0o604, 0o620):
        certified.pem.chmod(mode)
        await does_not_start(config, "is accessible to others: chmod 600")
    certified.pem.write_text("no certificate")
    certified.pem.chmod(0o600)
    await does_not_start(config, "are no certificate and its key in PEM")
    certified.pem.unlink()
    await does_not_start(config, "cannot read")
    with pytest.raises(ConfigError, match="cannot read the authority's certificate"):
        await AsyncClient("tls://127.0.0.1:1", ca=tmp_path / "missing").connect()
    with pytest.raises(ConfigError, match="is for tls://HOST:PORT, not for tcp"):
        AsyncClient("tcp://127.0.0.1:1", ca=certified.ca)
    with pytest.raises(ValueError, match="certificate and key go together"):
        configure({"tls": {"key": "x"}})


async def does_not_start(config: Config, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        async with bench(config, ready=False):
            raise AssertionError("it must not start")


async def test_a_client_of_another_protocol_is_told_in_one_line() -> None:
    for address in ("https://127.0.0.1:1", "tls://127.0.0.1", "tls://:5"):
        with pytest.raises(ConfigError, match="tcp://HOST:PORT or tls://HOST:PORT"):
            await AsyncClient(address).connect()


async def test_tls_at_a_gateway_that_speaks_none_is_said(tcp: Bench) -> None:
    with pytest.raises(GatewayUnreachableError, match=f"without TLS, use {tcp.listen}$"):
        await AsyncClient(tls_address(tcp)).connect()


async def test_the_commands_send_the_key_and_believe_the_authority(
    configure: Configure, certified: Certified, keys: str, tmp_path: Path, capsys: Output, monkeypatch: Patch
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")

    async def command(*arguments: str) -> tuple[int, Any]:
        return await asyncio.to_thread(main, list(arguments)), capsys.readouterr()

    async with bench(configure({"tls": certified.config, "api_keys": keys})) as b, serving(b):
        there = ["--gateway", tls_address(b), "--ca", str(certified.ca)]
        ask = ["chat", "Hi", "--text-only", "--no-play", *there]
        status, told = await command(*ask, "--api-key-file", str(key_file))
        assert (status, told.out.splitlines()[0]) == (0, "Hello")
        status, told = await command(*ask)
        assert (status, "unauthenticated" in told.err) == (1, True)
        status, told = await command("status", "--gateway", b.listen)
        assert (status, f"use {tls_address(b)}\n" in told.err) == (1, True)
        monkeypatch.setenv("OMNIRELAY_API_KEY", OTHER)
        assert (await command(*ask))[0] == 0
        assert (await command("status", *there))[0] == 0
        monkeypatch.setenv("OMNIRELAY_API_KEY", "wrong")
        status, told = await command("status", *there)
        assert (status, "wrong" in told.err) == (1, False)
        key_file.write_text("two words\n")
        status, told = await command(*ask, "--api-key-file", str(key_file))
        assert (status, "must hold an API key and nothing else" in told.err) == (1, True)
        assert (await command(*ask, "--api-key-file", str(tmp_path / "missing")))[0] == 1


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


Dates = tuple[timedelta, timedelta]
EXPIRED: Dates = (-60 * DAY, -DAY)
TOO_EARLY: Dates = (DAY, 60 * DAY)


def write_halves(folder: Path, certificate: Certified, key: Certified) -> dict[str, str]:
    """Certificate and key in files of their own, as ACME clients write them."""
    begin = "-----BEGIN CERTIFICATE"
    paths = {"certificate": folder / "own.crt", "key": folder / "own.key"}
    paths["certificate"].write_text(begin + certificate.pem.read_text().partition(begin)[2])
    paths["key"].touch(0o600)
    paths["key"].write_text(key.pem.read_text().partition(begin)[0])
    return {name: str(path) for name, path in paths.items()}


async def test_a_certificate_without_its_key_changes_nothing(
    configure: Configure, tmp_path: Path, caplog: Log
) -> None:
    old, new = Certified(tmp_path / "old"), Certified(tmp_path / "new")
    files = write_halves(tmp_path, old, old)
    keys = keys_file(tmp_path / "keys", alice={"key": KEY}, bob={"key": OTHER})

    async with bench(configure({"tls": files, "api_keys": str(keys)})) as b, serving(b):

        async def answers(key: str, ca: Path) -> None:
            async with AsyncClient(tls_address(b), key, ca) as client:
                assert (await client.chat("Hi", speech=False).result()).text == "Hello"

        keys_file(keys, alice={"key": KEY})
        write_halves(tmp_path, new, old)
        b.process.access.reload()
        assert "nothing was changed" in caplog.text
        assert "KEY_VALUES_MISMATCH" in caplog.text
        assert caplog.records[-1].levelname == "ERROR"
        await answers(KEY, old.ca)
        await answers(OTHER, old.ca)
        write_halves(tmp_path, new, new)
        keys.write_text("broken: [")
        b.process.access.reload()
        await answers(OTHER, old.ca)
        keys_file(keys, alice={"key": KEY})
        b.process.access.reload()
        await answers(KEY, new.ca)
        with pytest.raises(UnauthenticatedError):
            await AsyncClient(tls_address(b), OTHER, new.ca).connect()


@pytest.mark.parametrize(("dates", "told"), [(EXPIRED, "expired at"), (TOO_EARLY, "is not valid before")])
async def test_a_certificate_out_of_date_is_told_and_does_not_replace_one_that_is_not(
    configure: Configure, tmp_path: Path, caplog: Log, dates: Dates, told: str
) -> None:
    wrong, right = Certified(tmp_path / "wrong", *dates), Certified(tmp_path / "right")
    shown = tmp_path / "shown.pem"
    shown.touch(0o600)
    config = configure({"tls": {"certificate": str(shown), "key": str(shown)}})

    shown.write_bytes(wrong.pem.read_bytes())
    with caplog.at_level(logging.WARNING, "gateway"):
        async with bench(config) as b:
            b.process.access.warn()
            assert told in caplog.text
            shown.write_bytes(right.pem.read_bytes())
            b.process.access.reload()
            async with AsyncClient(tls_address(b), ca=right.ca) as client:
                assert (await client.status()).ready
            shown.write_bytes(wrong.pem.read_bytes())
            caplog.clear()
            b.process.access.reload()
            assert "nothing was changed" in caplog.text
            async with AsyncClient(tls_address(b), ca=right.ca) as client:
                assert (await client.status()).ready
            # Nor does the doctor mistake the gateway for another program.
            running = await asyncio.to_thread(network.ask_gateway, config)
            assert running is not None


def test_up_needs_neither_a_key_nor_an_authority_nor_a_certificate_of_today(
    place: Path, keys: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    wrong = Certified(tmp_path / "wrong", *EXPIRED)
    for name, path in (("API_KEYS", keys), ("TLS__CERTIFICATE", wrong.pem), ("TLS__KEY", wrong.pem)):
        monkeypatch.setenv(f"OMNIRELAY_GATEWAY__{name}", str(path))
    with start("omnirelay.cli", "up") as process:
        lines = read_until(process, "ready: tls://")
        assert any(line.startswith("[gateway]") and "expired at" in line for line in lines)
        end(process, signal.SIGINT)


async def test_when_it_expires_is_a_metric(configure: Configure, tmp_path: Path) -> None:
    old, new = Certified(tmp_path / "old"), Certified(tmp_path / "new", ends=90 * DAY)

    async with http_bench(configure(http_gateway(tls=old.config))) as b:
        for certified, days in ((old, 60), (new, 90)):
            old.pem.write_bytes(certified.pem.read_bytes())
            b.process.access.reload()
            trusting = ssl.create_default_context(cafile=certified.ca)
            async with httpx.AsyncClient(verify=trusting, timeout=60) as http:
                metrics = (await http.get(b.url.replace("http:", "https:") + "/metrics")).text
            (expiry,) = re.findall(r"(?m)^omnirelay_tls_certificate_expiry_timestamp_seconds (\S+)$", metrics)
            assert float(expiry) == pytest.approx(time.time() + days * 86_400, abs=120)


def pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def look(configure: Configure, file: Path) -> list[tuple[str, str]]:
    config = configure({"tls": {"certificate": str(file), "key": str(file)}})
    return [(each.level, each.what) for each in check_access(config) if each.check == "tls"]


def test_how_long_a_certificate_is_valid_is_told_in_days(tmp_path: Path) -> None:
    certified = Certified(tmp_path, -3 * DAY, -2 * DAY)
    found = read_certificate(TlsConfig(certificate=str(certified.pem), key=str(certified.pem)))
    assert found.left(found.expires + 2 * 86_400).endswith(" UTC, 2 days ago")
    assert found.left(found.expires - 2 * 86_400).endswith(" UTC, 2 days")


@pytest.mark.parametrize(
    ("dates", "level", "told"),
    [
        (EXPIRED, "problem", "expired at"),
        (TOO_EARLY, "problem", "is not valid before"),
        ((-DAY, 3 * DAY), "warning", "3 days"),
        ((-DAY, 60 * DAY), "ok", "60 days"),
    ],
)
def test_the_doctor_judges_the_dates(
    configure: Configure, tmp_path: Path, dates: Dates, level: str, told: str
) -> None:
    ((found, what),) = look(configure, Certified(tmp_path, *dates).pem)
    assert (found, told in what) == (level, True), what


def test_the_doctor_judges_what_stands_behind_it(configure: Configure, tmp_path: Path) -> None:
    root, other = Authority(tmp_path), Authority(tmp_path)
    middle = Authority(tmp_path, name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "middle")]))
    middle.serving("127.0.0.1")
    file = tmp_path / "127.0.0.1.pem"
    file.chmod(0o600)
    own = file.read_text()
    between = root.sign(middle.name, middle.key, ca=True)
    for chain, level in (
        ([between], "ok"),
        ([between, root.certificate], "ok"),
        ([other.certificate], "warning"),
        ([root.certificate], "warning"),
    ):
        file.write_text(own + "".join(map(pem, chain)))
        assert [level for level, _ in look(configure, file)] == [level]


async def test_a_certificate_that_is_not_for_servers_is_refused(configure: Configure, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    authority.serving("127.0.0.1", purposes)
    file = tmp_path / "127.0.0.1.pem"
    file.chmod(0o600)
    ((level, what),) = look(configure, file)
    assert level == "problem"
    assert "purpose" in what
    config = configure({"tls": {"certificate": str(file), "key": str(file)}})
    await does_not_start(config, r"clients cannot use .*purpose")
