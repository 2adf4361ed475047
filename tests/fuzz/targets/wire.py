"""Frames of every socket between the processes: the first byte says which one they came to.

Then come the number of blobs (0 to 3), two bytes for the length of each, the header, and the blobs.
"""

import atexit
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

import zmq

from gateway.dispatch.dispatcher import from_stage
from gateway.dispatch.stage_transport import StageTransport
from gateway.requests.lifecycle import Lifecycle, StateCounts
from gateway.requests.record import RequestRecord
from omnirelay.errors import InvalidRequestError, MessageError, OmniRelayError, SequenceError
from shared import messages
from shared.config import Config
from shared.messages import TextSampling
from shared.stage.resume import check_resumed
from shared.transport.wire import Decoder, encode
from shared.vllm.tensors import unpack_positions, unpack_rows
from tests.shared.strategies import SOCKETS, drawn, messages_of

MAX_BLOBS: Final = 3
MAX_PAYLOAD_BYTES: Final = 1024
WIDTH: Final = 4
VOCABULARY: Final = 1000
END_TOKENS: Final = frozenset({7, 8})
A_KIND: Final = 6
"""Seeds of each kind of message."""
DECODERS: Final[list[Decoder[Any]]] = [Decoder(union, MAX_PAYLOAD_BYTES) for union, _ in SOCKETS.values()]


def check(data: bytes) -> None:
    """Decode, write, decode again, and do with the message what its receiver does without a model."""
    if len(data) < 2:
        return
    number, frames = data[0] % len(DECODERS), _frames(data[1:])
    try:
        message = DECODERS[number].decode(frames)
    except MessageError:
        return
    written = [bytes(frame) for frame in encode(message)]
    assert [bytes(frame) for frame in encode(DECODERS[number].decode(written))] == written
    try:
        _take(message, frames)
    except (MessageError, InvalidRequestError, SequenceError):
        return


def _frames(data: bytes) -> list[bytes]:
    count, at = data[0] % (MAX_BLOBS + 1), 1
    sizes = [int.from_bytes(data[at + 2 * each : at + 2 * each + 2], "big") for each in range(count)]
    rest = data[at + 2 * count :]
    blobs: list[bytes] = []
    for size in reversed(sizes):
        start = max(0, len(rest) - size)
        rest, blob = rest[:start], rest[start:]
        blobs.insert(0, blob)
    return [rest, *blobs]


def _take(message: Any, frames: list[bytes]) -> None:
    match message:
        case messages.ThinkRequest():
            if message.resume is not None:
                _check_resumed(message.resume.text_token_ids, message.resume.finish_reason, True)
        case messages.SpeechStart():
            if message.resume is not None:
                _check_resumed(message.resume.codec_token_ids, message.resume.finish_reason, False)
        case messages.ConditioningRows():
            message.rows.check_fits(WIDTH, "float32")
            assert unpack_rows(message.rows).shape == message.rows.shape
            unpack_positions(message.additional, message.rows.shape[0])
        case messages.TextDelta() | messages.CodecDelta() | messages.AudioChunk():
            _record().apply(message)
        case messages.RequestFailed():
            assert isinstance(from_stage(message), OmniRelayError)
        case messages.Heartbeat() | messages.AbortDone() | messages.Farewell():
            _hear(messages.control_identity(message.stage, message.instance), frames)


def _check_resumed(token_ids: list[int], reason: messages.FinishReason | None, keeps_end: bool) -> None:
    check_resumed(
        "tokens",
        token_ids,
        reason,
        most=64,
        end_tokens=END_TOKENS,
        vocabulary=VOCABULARY,
        keeps_end=keeps_end,
    )


def _record() -> RequestRecord:
    think = messages.ThinkRequest(
        request_id="gw.1", prompt_token_ids=[1, 2], sampling=TextSampling(max_tokens=9), seed=3
    )
    return RequestRecord(think, Lifecycle(StateCounts()))


def _hear(speaker: str, frames: list[bytes]) -> None:
    """What the gateway does with a message of a stage before it believes it."""
    with suppress(MessageError):
        _link()._decode_control(zmq.Frame(speaker.encode()), [zmq.Frame(each) for each in frames])


@cache
def _link() -> StageTransport:
    folder = tempfile.TemporaryDirectory(prefix="fuzz-")
    paths = {name: f"ipc://{Path(folder.name, name)}" for name in ("events", "control")}
    link = StageTransport(Config.model_validate({"gateway": paths}))
    atexit.register(folder.cleanup)
    atexit.register(link._context.destroy, 0)
    return link


def seeds() -> Iterator[bytes]:
    """Give every message as it is sent."""
    for number, (union, _) in enumerate(SOCKETS.values()):
        for kind in get_args(union):
            for message in drawn(messages_of(kind), A_KIND):
                header, *blobs = [bytes(frame) for frame in encode(message)]
                if len(blobs) <= MAX_BLOBS:
                    sizes = b"".join(len(blob).to_bytes(2, "big") for blob in blobs)
                    yield bytes([number, len(blobs)]) + sizes + header + b"".join(blobs)
