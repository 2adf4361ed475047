"""All kinds of requests, and clients of all manners."""

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final

import msgspec

from omnirelay import Client, GenerateRequest, error_codes
from omnirelay.client.request import build_request
from omnirelay.errors import CancelledRequestError, GatewayUnreachableError, OmniRelayError
from omnirelay.events import AcceptedEvent, CodecEvent, ErrorEvent
from omnirelay.protocol import (
    LENGTH_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Reply,
    ServerMessage,
    Submit,
    pack,
    parse_tcp,
)
from tests.chaos.streams import CHUNK_FRAMES, Heard, draws
from tests.support.media import clip, picture, spoken

VARIANTS: Final = 4
SLOW_BYTES, SLOW_S = 4096, 0.02
"""A slow reader takes so much at once, and then waits so long: half the time that the speech lasts."""
RECEIVE_BUFFER: Final = 8192
TIMEOUT_S: Final = 300.0

Kind = str
Name = str | None


def catalogue() -> dict[Kind, list[GenerateRequest]]:
    """Requests of each kind that is answered, some greedy, some drawn with a seed."""

    def some(make: Callable[[int], GenerateRequest]) -> list[GenerateRequest]:
        return [make(number) for number in range(VARIANTS)]

    def speech(number: int, streaming: bool = True) -> GenerateRequest:
        return GenerateRequest(
            prompt_token_ids=[number + 1] * (10 + 7 * number),
            seed=number,
            streaming=streaming,
            chunk_frames=CHUNK_FRAMES if streaming else [],
            text_sampling=draws(24 + 8 * number, number % 2 == 0),
            codec_sampling=draws(72 + 40 * number, number // 2 == 0),
        )

    return {
        "text": some(
            lambda number: build_request(
                f"Question number {number}?",
                speech=False,
                seed=number,
                text_sampling=draws(60 + 20 * number, number % 2 == 0),
            )
        ),
        "speech": some(speech),
        "speech in one piece": some(lambda number: speech(number, streaming=False)),
        "picture and sound, speech": some(
            lambda number: build_request(
                "What is this?",
                images=picture("png", number),
                audio=spoken(),
                seed=number,
                chunk_frames=CHUNK_FRAMES,
                text_sampling=draws(16, number % 2 == 0),
                codec_sampling=draws(60, number // 2 == 0),
            )
        ),
        "video, text": some(
            lambda number: build_request(
                "What happens?",
                videos=clip("mp4", 1.5, 12, 112, 160, seed=number),
                speech=False,
                seed=number,
                text_sampling=draws(24, number % 2 == 0),
            )
        ),
    }


def listen(client: Client, request: GenerateRequest, heard: Heard) -> Name:
    """Hear an answer to its end."""
    answer = client.chat(request)
    try:
        for event in answer:
            heard.take(event)
    except OmniRelayError as error:
        heard.error = error
    return answer.request_id


def hear_a_part(
    client: Client, request: GenerateRequest, heard: Heard, chance: random.Random, cancels: bool = True
) -> Name:
    """Hear a part; then cancel, or listen no more."""
    answer = client.chat(request)
    events = chance.randrange(20)
    try:
        for number, event in enumerate(answer):
            heard.take(event)
            if number == events and cancels:
                answer.cancel()
            elif number == events:
                break
    except CancelledRequestError as error:
        heard.error = None if cancels else error
    except OmniRelayError as error:
        heard.error = error
    return answer.request_id


def leave(address: str, request: GenerateRequest, heard: Heard, chance: random.Random) -> Name:
    """Hear a part, and go away without a word."""
    try:
        client = Client(address, reconnect_s=0)
    except GatewayUnreachableError as error:
        heard.error = error
        return None
    with client:
        return hear_a_part(client, request, heard, chance, cancels=False)


def read_slowly(address: str, request: GenerateRequest, heard: Heard) -> Name:
    """Take the answer from the network as slowly as a bad line would."""
    with closing(socket.socket()) as line:
        return _read_slowly(line, address, request, heard)


def _read_slowly(line: socket.socket, address: str, request: GenerateRequest, heard: Heard) -> Name:
    name: Name = None
    try:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        line.settimeout(TIMEOUT_S)
        line.connect(parse_tcp(address))
        line.sendall(pack(Hello(PROTOCOL_VERSION)))
        line.sendall(pack(Submit(1, msgspec.Raw(msgspec.msgpack.encode(request)))))
        for message in _messages(line):
            event = message.event if isinstance(message, Reply) else None
            if isinstance(event, AcceptedEvent):
                name = event.request_id
            elif isinstance(event, ErrorEvent):
                heard.error = error_codes.from_event(event)
                return name
            elif event is not None and not isinstance(event, CodecEvent):
                heard.take(event)
                if heard.ended:
                    return name
    except ConnectionError as error:
        heard.error = GatewayUnreachableError(f"the connection was lost: {error}")
    else:
        heard.error = GatewayUnreachableError("the connection was closed")
    return name


def _messages(line: socket.socket) -> Iterator[ServerMessage]:
    buffer = bytearray()
    while piece := line.recv(SLOW_BYTES):
        buffer += piece
        time.sleep(SLOW_S)
        while len(buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(buffer[:LENGTH_BYTES], "big")
            if len(buffer) < end:
                break
            yield msgspec.msgpack.decode(buffer[LENGTH_BYTES:end], type=ServerMessage)
            del buffer[:end]
