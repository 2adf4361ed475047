"""A gateway's certificate: renewed while it serves, out of date, or not its own."""

import asyncio
import logging
import re
import signal
import ssl
import time
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gateway.access.certificate import read_certificate
from omnirelay import AsyncClient
from omnirelay.errors import UnauthenticatedError
from ops.doctor import network
from ops.doctor.access import check_access
from shared.config import TlsConfig
from tests.gateway.bench import Configure, Log, Patch, bench
from tests.gateway.guarded import KEY, OTHER, keys_file, serving
from tests.gateway.http_bench import http_bench, http_gateway
from tests.gateway.https_server import Authority
from tests.gateway.test_processes import end, read_until, start
from tests.gateway.test_tls import DAY, Certified, does_not_start, tls_address

Dates = tuple[timedelta, timedelta]
EXPIRED: Dates = (-60 * DAY, -DAY)
TOO_EARLY: Dates = (DAY, 60 * DAY)


class Halves:
    """Certificate and key in files of their own, as ACME clients write them."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = folder / "own.crt", folder / "own.key"
        self.config = {"certificate": str(self.certificate), "key": str(self.key)}

    def write_certificate(self, of: Certified) -> None:
        text = of.pem.read_text()
        self.certificate.write_text(text[text.index("-----BEGIN CERTIFICATE") :])

    def write_key(self, of: Certified) -> None:
        text = of.pem.read_text()
        self.key.touch(0o600)
        self.key.write_text(text[: text.index("-----BEGIN CERTIFICATE")])


async def test_a_certificate_without_its_key_changes_nothing(
    configure: Configure, tmp_path: Path, caplog: Log
) -> None:
    old, new = Certified(tmp_path / "old"), Certified(tmp_path / "new")
    files = Halves(tmp_path)
    files.write_certificate(old)
    files.write_key(old)
    keys = keys_file(tmp_path / "keys", alice={"key": KEY}, bob={"key": OTHER})

    async with bench(configure({"tls": files.config, "api_keys": str(keys)})) as b, serving(b):

        async def answers(key: str, ca: Path) -> None:
            async with AsyncClient(tls_address(b), key, ca) as client:
                assert (await client.chat("Hi", speech=False).result()).text == "Hello"

        keys_file(keys, alice={"key": KEY})
        files.write_certificate(new)
        b.process.access.reload()
        assert "nothing was changed" in caplog.text
        assert "KEY_VALUES_MISMATCH" in caplog.text
        assert caplog.records[-1].levelname == "ERROR"
        await answers(KEY, old.ca)
        await answers(OTHER, old.ca)
        files.write_key(new)
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


def test_up_starts_with_a_certificate_out_of_date(place: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    wrong = Certified(tmp_path / "wrong", *EXPIRED)
    for name in ("CERTIFICATE", "KEY"):
        monkeypatch.setenv(f"OMNIRELAY_GATEWAY__TLS__{name}", str(wrong.pem))
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
            async with httpx.AsyncClient(verify=trusting) as http:
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


def test_the_doctor_judges_the_dates(configure: Configure, tmp_path: Path) -> None:
    for number, (dates, level, told) in enumerate(
        [
            (EXPIRED, "problem", "expired at"),
            (TOO_EARLY, "problem", "is not valid before"),
            ((-DAY, 3 * DAY), "warning", "3 days"),
            ((-DAY, 60 * DAY), "ok", "60 days"),
        ]
    ):
        ((found, what),) = look(configure, Certified(tmp_path / str(number), *dates).pem)
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


def test_a_certificate_that_is_not_for_servers_is_refused(configure: Configure, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    authority.serving("127.0.0.1", purposes)
    file = tmp_path / "127.0.0.1.pem"
    file.chmod(0o600)
    ((level, what),) = look(configure, file)
    assert level == "problem"
    assert "purpose" in what
    config = configure({"tls": {"certificate": str(file), "key": str(file)}})
    does_not_start(config, r"clients cannot use .*purpose")
