"""``omnirelay keys``, and a real gateway and launcher whose sockets need them; the stages are imitated."""

import asyncio
import http.client
import re
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from omnirelay import AsyncClient
from omnirelay.cli.main import main
from ops.launcher import Stack, running
from shared.config import Config, load_config
from shared.messages import TextDelta
from shared.transport.keys import ROLES, load_keys, secret_file
from shared.transport.wire import encode
from tests.support.ports import free_ports


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keys, and an environment in which every process uses them."""
    directory = tmp_path / "keys"
    assert main(["keys", str(directory)]) == 0
    monkeypatch.setenv("OMNIRELAY_SECURITY__KEYS", str(directory))
    return directory


def test_the_command_makes_keys_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "keys"
    assert main(["keys", str(directory)]) == 0
    told = capsys.readouterr().out
    for role in ROLES:
        assert f"{role}.key, {role}.key_secret" in told
        assert stat.S_IMODE(secret_file(directory, role).stat().st_mode) == 0o600
        assert load_keys(directory, role).secret.decode() not in told
    assert f"security.keys: {directory}" in told


def test_the_command_replaces_keys_only_if_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(tmp_path)]) == 0
    before = load_keys(tmp_path, "gateway").secret
    assert main(["keys", str(tmp_path)]) == 1
    assert re.search(r"output_unwritable: .*; nothing was changed: .*--force", capsys.readouterr().err)
    assert load_keys(tmp_path, "gateway").secret == before
    assert main(["keys", str(tmp_path), "--force"]) == 0
    assert load_keys(tmp_path, "gateway").secret != before


def metric(config: Config, name: str) -> dict[str, float]:
    """A counter of the gateway's, by reason."""
    assert config.gateway.http is not None
    connection = http.client.HTTPConnection(config.gateway.http.removeprefix("tcp://"), timeout=10)
    with closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return {
        reason: float(value)
        for reason, value in re.findall(rf'^{name}{{.*reason="(\w+)".*}} (\S+)$', text, re.MULTILINE)
    }


async def test_strangers_at_a_running_stack_are_counted_and_change_nothing(place: Path, keys: Path) -> None:
    lines: list[str] = []

    config = load_config()
    async with running(Stack(config, None, lambda name, line: lines.append(f"{name}: {line}"))):
        forged = encode(TextDelta(request_id="a", seq=0, token_ids=[1]))
        with zmq.Context() as outside:
            sockets = []
            for address in (config.gateway.events, config.gateway.control, config.stages.thinker.inbox):
                for kind in (zmq.PUSH, zmq.DEALER):
                    stranger = outside.socket(kind)
                    stranger.set(zmq.LINGER, 0)
                    stranger.set(zmq.SNDTIMEO, 0)
                    stranger.connect(address)
                    stranger.send_multipart(forged)
                    sockets.append(stranger)

            async def refused() -> float:
                counts = await asyncio.to_thread(metric, config, "omnirelay_peers_refused_total")
                assert set(counts) == {"no_curve", "wrong_server_key", "unknown_key", "handshake"}
                return sum(counts.values())

            while await refused() < 4:
                await asyncio.sleep(0.02)
            for stranger in sockets:
                stranger.close()
        async with AsyncClient(config.gateway.listen) as client:
            assert (await client.chat("Hello").result()).done.audio_seconds == 1.0
            report = await client.status()
        assert report.refused == {}
        assert report.dropped_events == 0
    told = [line for line in lines if line.startswith("gateway: ") and "a connection was refused" in line]
    # One for each socket and reason, however often they come.
    assert 1 <= len(told) <= 4


def failing_gateway() -> str:
    """What a gateway says that must not start."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_gateway_that_others_can_reach_does_not_start_without_keys(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIRELAY_GATEWAY__EVENTS", f"tcp://*:{free_ports(1)[0]}")
    told = failing_gateway()
    assert "config_invalid: " in told
    assert "make keys with `omnirelay keys DIR` and set security.keys to DIR" in told


def test_a_gateway_does_not_start_with_bad_keys(place: Path, keys: Path) -> None:
    """What else may be wrong with them is in ``tests/shared/test_keys.py``."""
    secret_file(keys, "gateway").chmod(0o640)
    output = failing_gateway()
    assert "config_invalid: " in output
    assert "may be read by others (mode 0640): `chmod 600 " in output
