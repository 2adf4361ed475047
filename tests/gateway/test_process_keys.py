"""Keys of sockets: ``omnirelay keys``, processes that need them, and what a stage may say with its own."""

import asyncio
import re
import stat
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from gateway.dispatch.stage_transport import StageTransport
from omnirelay import AsyncClient
from omnirelay.cli.main import main
from shared.config import Config, load_config
from shared.messages import (
    ROLES,
    STAGES,
    AbortDone,
    AudioChunk,
    CodecDelta,
    ControlToGateway,
    Farewell,
    Heartbeat,
    Mark,
    RequestFailed,
    StageEvent,
    StageLimits,
    StageLoad,
    StageName,
    TextDelta,
    control_identity,
)
from shared.messages.payloads import Blob
from shared.transport.control import ControlClient
from shared.transport.curve import open_context
from shared.transport.keys import load_keys, make_keys, secret_file
from shared.transport.sockets import connect
from shared.transport.wire import encode
from tests.gateway.bench import Log, Output, Patch
from tests.gateway.fake_stages import until
from tests.gateway.test_log_privacy import talkative
from tests.gateway.test_tls import does_not_start
from tests.support.http import get
from tests.support.ports import free_ports


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Keys, and an environment in which every process uses them."""
    directory = tmp_path / "keys"
    assert main(["keys", str(directory)]) == 0
    monkeypatch.setenv("OMNIRELAY_SECURITY__KEYS", str(directory))
    return directory


def test_the_command_makes_keys_and_says_what_to_do(tmp_path: Path, capsys: Output) -> None:
    directory = tmp_path / "keys"
    assert main(["keys", str(directory)]) == 0
    told = capsys.readouterr().out
    for role in ROLES:
        assert f"{role}.key, {role}.key_secret" in told
        assert stat.S_IMODE(secret_file(directory, role).stat().st_mode) == 0o600
        assert load_keys(directory, role).secret.decode() not in told
    assert f"security.keys: {directory}" in told


def test_the_command_replaces_keys_only_if_told_to(tmp_path: Path, capsys: Output) -> None:
    assert main(["keys", str(tmp_path)]) == 0
    before = load_keys(tmp_path, "gateway").secret
    assert main(["keys", str(tmp_path)]) == 1
    assert re.search(r"output_unwritable: .*; nothing was changed: .*--force", capsys.readouterr().err)
    assert load_keys(tmp_path, "gateway").secret == before
    assert main(["keys", str(tmp_path), "--force"]) == 0
    assert load_keys(tmp_path, "gateway").secret != before


async def test_strangers_at_a_running_stack_are_counted_and_change_nothing(place: Path, keys: Path) -> None:
    lines: list[str] = []
    async with talkative(lines) as config:
        forged = encode(TextDelta(request_id="a", seq=0, token_ids=[1]))
        with zmq.Context() as outside, ExitStack() as strangers:
            for address in (config.gateway.events, config.gateway.control, config.stages.thinker.inbox):
                for kind in (zmq.PUSH, zmq.DEALER):
                    stranger = strangers.enter_context(outside.socket(kind))
                    stranger.set(zmq.LINGER, 0)
                    stranger.set(zmq.SNDTIMEO, 0)
                    stranger.connect(address)
                    # It may have been refused already.
                    with suppress(zmq.Again):
                        stranger.send_multipart(forged)

            async def refused() -> float:
                told = await asyncio.to_thread(get, config.gateway.http or "", "/metrics")
                samples = told.metrics["omnirelay_peers_refused_total"].samples
                counts = {each.labels["reason"]: each.value for each in samples}
                assert set(counts) == {"no_curve", "wrong_server_key", "unknown_key", "handshake"}
                return sum(counts.values())

            while await refused() < 4:
                await asyncio.sleep(0.02)
        async with AsyncClient(config.gateway.listen) as client:
            assert (await client.chat("Hello").result()).done.audio_seconds == 1.0
            report = await client.status()
        assert (report.refused, report.dropped_events) == ({}, 0)
    told = [line for line in lines if line.startswith("gateway: ") and "a connection was refused" in line]
    # One for each socket and reason, however often they come.
    assert 1 <= len(told) <= 4


async def test_a_gateway_does_not_start_without_good_keys(place: Path, keys: Path) -> None:
    """What else may be wrong with them is in ``tests/shared/test_keys.py``."""
    secret_file(keys, "gateway").chmod(0o640)
    await does_not_start(load_config(), r"may be read by others \(mode 0640\): `chmod 600 ")


INSTANCE = "one"


@pytest.fixture(scope="module")
def made_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    make_keys(directory, replace=False)
    return directory


@pytest.fixture
def config(made_keys: Path) -> Config:
    return linked(keys=str(made_keys))


def linked(**security: str) -> Config:
    """Of a gateway whose sockets for stages are on free ports."""
    events, control = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    return Config.model_validate({"gateway": {"events": events, "control": control}, "security": security})


@pytest.fixture
async def opened() -> AsyncIterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def client_of(config: Config, key: StageName, claimed: StageName, opened: ExitStack) -> ControlClient:
    """A stage with its own key, which goes by another's name, if that is claimed."""
    context = open_context(config, key)
    opened.callback(context.term)
    client = ControlClient(context, config.gateway.control, control_identity(claimed, INSTANCE))
    opened.callback(client.close)
    return client


def words_of(stage: StageName) -> list[ControlToGateway]:
    """One of each that a stage can say of itself."""
    inbox, limits = "tcp://127.0.0.1:1", StageLimits(max_positions=100, speakers=[])
    own: Any = {"stage": stage, "instance": INSTANCE}
    heartbeat = Heartbeat(**own, pid=1, inbox=inbox, limits=limits, load=StageLoad(), peak_memory_bytes=1)
    return [heartbeat, AbortDone(**own, request_id="a"), Farewell(**own)]


@pytest.mark.parametrize("key", STAGES)
async def test_a_key_speaks_for_its_own_stage_alone(
    config: Config, key: StageName, opened: ExitStack, caplog: Log
) -> None:
    words: list[ControlToGateway] = []
    events: list[StageEvent] = []
    link = StageTransport(config)
    opened.callback(link.close)
    link.start(events.append, words.append)
    context = open_context(config, key)
    opened.callback(context.term)
    push = opened.enter_context(context.socket(zmq.PUSH))
    connect(push, config.gateway.events, "gateway")
    for stage in STAGES:
        client = client_of(config, key, stage, opened)
        for message in words_of(stage):
            await until(partial(client.send, message))
        for event in events_of(stage):
            push.send_multipart(encode(event))
    await until(lambda: len(words) + len(events) + link.refused().total() == 17)
    assert words == words_of(key)
    assert events == events_of(key)[:2]
    assert link.refused() == {"message_invalid": 12}
    for other in set(STAGES) - {key}:
        assert f"the {key}'s key came with a message of the {other}" in caplog.text


def events_of(stage: StageName) -> list[StageEvent | Mark]:
    """One of each that a stage tells of requests."""
    what: dict[StageName, StageEvent] = {
        "thinker": TextDelta(request_id="a", seq=0, token_ids=[1]),
        "talker": CodecDelta(request_id="a", seq=0, token_ids=[1]),
        "token2wav": AudioChunk(request_id="a", seq=0, samples=0, data=Blob(b"")),
    }
    failed = RequestFailed(request_id="a", stage=stage, code="busy", message="it is")
    return [what[stage], failed, Mark(sender=f"{stage}.{INSTANCE}", channel="0" * 16, position=0)]
