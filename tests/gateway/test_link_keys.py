"""On the gateway's sockets a stage speaks for itself alone: its key says who it is."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import zmq

from gateway.dispatch.stage_transport import StageTransport
from shared.config import Config
from shared.messages import (
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
from shared.transport.keys import make_keys
from shared.transport.sockets import connect
from shared.transport.wire import encode
from tests.gateway.fake_stages import until
from tests.support.ports import free_ports

INSTANCE = "one"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    make_keys(directory, replace=False)
    return directory


@pytest.fixture
def config(keys: Path) -> Config:
    events, control = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    return Config.model_validate(
        {"gateway": {"events": events, "control": control}, "security": {"keys": str(keys)}}
    )


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def no_event(event: StageEvent) -> None:
    raise AssertionError(f"nobody sent {event}")


def no_word(word: ControlToGateway) -> None:
    raise AssertionError(f"nobody said {word}")


def client_of(config: Config, key: StageName, claimed: StageName, closing: ExitStack) -> ControlClient:
    """A stage with its own key, which goes by another's name, if that is claimed."""
    context = open_context(config, key)
    closing.callback(context.term)
    client = ControlClient(context, config.gateway.control, control_identity(claimed, INSTANCE))
    closing.callback(client.close)
    return client


def all_of(stage: StageName) -> list[ControlToGateway]:
    """One of each that a stage can say."""
    heartbeat = Heartbeat(
        stage=stage,
        pid=1,
        instance=INSTANCE,
        inbox="tcp://127.0.0.1:1",
        limits=StageLimits(max_positions=100, speakers=[]),
        load=StageLoad(),
        peak_memory_bytes=1,
    )
    return [
        heartbeat,
        AbortDone(stage=stage, request_id="a", instance=INSTANCE),
        Farewell(stage=stage, instance=INSTANCE),
    ]


@pytest.mark.parametrize("key", STAGES)
async def test_a_key_speaks_for_its_own_stage_and_for_no_other(
    config: Config, key: StageName, closing: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[ControlToGateway] = []
    link = StageTransport(config)
    try:
        link.start(no_event, heard.append)
        for claimed in STAGES:
            client = client_of(config, key, claimed, closing)
            for message in all_of(claimed):
                await until(partial(client.send, message))
        await until(lambda: len(heard) + link.refused().total() == 3 * len(STAGES))
        assert heard == all_of(key)
        assert link.refused() == {"message_invalid": 6}
        for other in set(STAGES) - {key}:
            assert f"the {key}'s key came with a message of the {other}" in caplog.text
    finally:
        link.close()


def events_of(stage: StageName) -> list[StageEvent | Mark]:
    """One of each that a stage tells of requests."""
    what: dict[StageName, StageEvent] = {
        "thinker": TextDelta(request_id="a", seq=0, token_ids=[1]),
        "talker": CodecDelta(request_id="a", seq=0, token_ids=[1]),
        "token2wav": AudioChunk(request_id="a", seq=0, samples=0, data=Blob(b"")),
    }
    failed = RequestFailed(request_id="a", stage=stage, code="busy", message="it is")
    return [what[stage], failed, Mark(sender=f"{stage}.{INSTANCE}", channel="0" * 16, position=0)]


@pytest.mark.parametrize("key", STAGES)
async def test_what_a_key_tells_of_requests_is_its_own_stages(
    config: Config, key: StageName, closing: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[StageEvent] = []
    link = StageTransport(config)
    try:
        link.start(heard.append, no_word)
        context = open_context(config, key)
        closing.callback(context.term)
        push = closing.enter_context(context.socket(zmq.PUSH))
        connect(push, config.gateway.events, "gateway")
        for stage in STAGES:
            for event in events_of(stage):
                push.send_multipart(encode(event))
        await until(lambda: len(heard) + link.refused().total() == 8)
        assert heard == events_of(key)[:2]
        assert link.refused() == {"message_invalid": 6}
        for other in set(STAGES) - {key}:
            assert f"the {key}'s key came with a message of the {other}" in caplog.text
    finally:
        link.close()


async def test_without_keys_it_goes_by_its_name(closing: ExitStack) -> None:
    events, control = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    config = Config.model_validate({"gateway": {"events": events, "control": control}})

    heard: list[ControlToGateway] = []
    link = StageTransport(config)
    try:
        link.start(no_event, heard.append)
        client = client_of(config, "talker", "talker", closing)
        for message in all_of("talker"):
            await until(partial(client.send, message))
        await until(lambda: len(heard) == 3)
        assert link.refused() == {}
    finally:
        link.close()
