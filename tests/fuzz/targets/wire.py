"""Frames of every socket between the processes: the first byte says which one they came to.

Then come the number of blobs (0 to 3), two bytes for the length of each, the header, and the blobs.
"""

import atexit
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import zmq

from gateway.dispatch.dispatcher import from_stage
from gateway.dispatch.stage_transport import StageTransport
from gateway.requests.lifecycle import Lifecycle, StateCounts
from gateway.requests.record import RequestRecord
from omnirelay.errors import InvalidRequestError, MessageError, OmniRelayError, SequenceError
from shared import messages
from shared.config import Config
from shared.messages import ResumedSpeech, Sampling, SpeechSettings, TextSampling
from shared.messages.payloads import (
    AdditionalInformationEntry,
    AdditionalInformationPayload,
    Blob,
    PromptEmbedsPayload,
)
from shared.stage.resume import check_resumed
from shared.transport.wire import Decoder, encode
from shared.vllm.tensors import unpack_positions, unpack_rows
from tests.shared.strategies import SOCKETS

MAX_BLOBS: Final = 3
MAX_PAYLOAD_BYTES: Final = 1024
WIDTH: Final = 4
VOCABULARY: Final = 1000
END_TOKENS: Final = frozenset({7, 8})
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
    return RequestRecord(_think(), Lifecycle(StateCounts()))


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
    for number, message in _messages():
        header, *blobs = [bytes(frame) for frame in encode(message)]
        sizes = b"".join(len(blob).to_bytes(2, "big") for blob in blobs)
        yield bytes([number, len(blobs)]) + sizes + header + b"".join(blobs)


def _think(**more: Any) -> messages.ThinkRequest:
    return messages.ThinkRequest(
        request_id="gw.1", prompt_token_ids=[1, 2], sampling=TextSampling(max_tokens=9), seed=3, **more
    )


def _messages() -> Iterator[tuple[int, Any]]:
    sampling = Sampling(max_tokens=5, min_tokens=1, temperature=0.9, top_k=40, top_p=0.8)
    speech = SpeechSettings(speaker="Chelsie", sampling=sampling, seed=3)
    route = messages.Route(thinker="t0", talker="k0", token2wav="w0")
    spoken = ResumedSpeech(codec_token_ids=[1, 2, 3], chunk_samples=[480])
    span = f"00-{'1' * 32}-{'2' * 16}-01"
    both: dict[str, Any] = {"request_id": "gw.1", "speech": speech, "priority": 0}
    both |= {"traceparent": span, "route": route}
    items = [messages.MediaItem(kind=kind, data=Blob(kind.encode())) for kind in messages.MEDIA_KINDS]
    resume = messages.Resume(text_token_ids=[5, 7], finish_reason="stop", speech=spoken)
    yield 0, _think(speech=speech, media=items, use_audio_in_video=True, resume=resume, route=route)
    yield (
        0,
        messages.ThinkRequest(
            request_id="gw.1",
            prompt_token_ids=[1],
            sampling=messages.TextSampling(max_tokens=1),
            seed=0,
            media=items[:1],
            early="recording",
            route=route,
        ),
    )
    yield 1, messages.SpeechStart(**both, prompt_tokens=4, resume=spoken)
    for dtype in ("float32", "bfloat16"):
        size = 2 * WIDTH * (4 if dtype == "float32" else 2)
        yield (
            1,
            messages.ConditioningRows(
                request_id="gw.1",
                seq=0,
                start=0,
                rows=PromptEmbedsPayload(shape=(2, WIDTH), dtype=dtype, data=Blob(bytes(size))),
                additional=AdditionalInformationPayload(
                    entries={
                        "mrope_positions": AdditionalInformationEntry(
                            tensor_data=Blob(bytes(24)), tensor_shape=(3, 2), tensor_dtype="int32"
                        ),
                        "list": AdditionalInformationEntry(list_data=[1, 2.5, "a", True, None]),
                    }
                ),
                last=True,
            ),
        )
    yield 2, messages.SynthesisStart(**both, chunk_samples=[480, 480])
    yield 2, messages.CodecTokens(request_id="gw.1", seq=1, token_ids=[4, 5], last=True)
    usage = messages.PromptUsage(tokens=7, cached_tokens=3)
    yield 3, messages.TextDelta(request_id="gw.1", seq=0, token_ids=[9], finish_reason="stop", prompt=usage)
    yield 3, messages.CodecDelta(request_id="gw.1", seq=0, token_ids=[9], conditioned=True)
    yield 3, messages.AudioChunk(request_id="gw.1", seq=0, samples=2, data=Blob(bytes(8)), last=True)
    mark: dict[str, Any] = {"sender": "talker.k0", "channel": "0123456789abcdef", "position": 1 << 40}
    for number in range(4):
        yield number, messages.Mark(**mark)
    for number in (4, 5):
        yield number, messages.Credit(**mark)
    for code in ("busy", "media_invalid", "sequence_invalid", "request_failed", "unknown_speaker"):
        yield 3, messages.RequestFailed(request_id="gw.1", stage="talker", code=code, message="why")
    beat = messages.Heartbeat(
        stage="thinker",
        pid=1,
        instance="t0",
        inbox="tcp://127.0.0.1:5561",
        limits=messages.StageLimits(max_positions=9, speakers=["Chelsie"]),
        load=messages.StageLoad(running=1, steps=2),
        gateway="gw",
        peers=["k0"],
    )
    yield 4, beat
    yield 4, messages.AbortDone(request_id="gw.1", stage="talker", instance="k0")
    yield 4, messages.Farewell(stage="token2wav", instance="w0")
    yield 5, messages.Peers(gateway="gw", replicas={"k0": "tcp://127.0.0.1:5562"}, released=True)
    yield 5, messages.Abort(request_id="gw.1")
    yield 5, messages.Closing()
