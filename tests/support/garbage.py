"""What no process of the stack would send, for its sockets."""

import random

import msgspec
import zmq

from shared.messages import (
    Abort,
    AudioChunk,
    CodecTokens,
    ConditioningRows,
    Sampling,
    SpeechSettings,
    SpeechStart,
    SynthesisStart,
    TextDelta,
    TextSampling,
    ThinkRequest,
)
from shared.messages.payloads import AdditionalInformationPayload, Blob, PromptEmbedsPayload
from shared.transport.wire import encode

SPEECH = SpeechSettings(speaker="Chelsie", seed=1, sampling=Sampling(max_tokens=20))


def push(address: str, messages: list[list[bytes]]) -> None:
    """Send raw frames, and wait until the socket has taken them all."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.set(zmq.LINGER, 5000)
        sender.connect(address)
        for frames in messages:
            sender.send_multipart(frames)


def lies() -> list[list[bytes]]:
    """Well-formed frames whose content is not true, or is for nobody."""
    nothing = AdditionalInformationPayload(entries={})

    def rows(shape: tuple[int, int], dtype: str, data: bytes) -> list[bytes]:
        payload = PromptEmbedsPayload(shape=shape, dtype=dtype, data=Blob(data))
        message = ConditioningRows(request_id="x", seq=0, start=0, rows=payload, additional=nothing)
        return [bytes(frame) for frame in encode(message)]

    honest = rows((2, 4), "float32", bytes(32))
    messages = [
        rows((2, 4), "float32", bytes(31)),
        rows((2, -4), "float32", bytes(32)),
        rows((2**31, 2**31), "float32", bytes(32)),
        rows((2, 4), "int64", bytes(64)),
        rows((2, 4), "object", bytes(64)),
        honest,
        honest[:1],
        [*honest, b"more"],
        [b"\x02" + honest[0][1:], *honest[1:]],
        [honest[0][:-5], *honest[1:]],
    ]
    for message in (
        SynthesisStart(request_id="x", priority=0, speech=msgspec.structs.replace(SPEECH, speaker="Nobody")),
        CodecTokens(request_id="nobody", seq=3, token_ids=[1, 2]),
        SpeechStart(request_id="y", prompt_tokens=2**30, priority=0, speech=SPEECH),
        ThinkRequest(request_id="z", prompt_token_ids=[2**30], sampling=TextSampling(max_tokens=5), seed=1),
        AudioChunk(request_id="x", seq=0, samples=9, data=Blob(b"1234")),
        TextDelta(request_id="unknown", seq=0, token_ids=[1]),
        Abort(request_id="x"),
    ):
        messages.append([bytes(frame) for frame in encode(message)])
    return messages


def noise(count: int, seed: int) -> list[list[bytes]]:
    """Random frames, and true ones with some bytes changed."""
    chance = random.Random(seed)
    messages = []
    for index in range(count):
        if index % 2:
            frames = [chance.randbytes(chance.randrange(200)) for _ in range(chance.randrange(1, 5))]
        else:
            frames = [damaged(frame, chance) for frame in chance.choice(lies())]
        messages.append(frames)
    return messages


def damaged(frame: bytes, chance: random.Random) -> bytes:
    changed = bytearray(frame)
    for _ in range(chance.randrange(4) if frame else 0):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)
