"""The TCP protocol between clients and the gateway; docs/protocol.md describes its use.

A frame is its length in four bytes, big-endian, and a msgpack message.  After :class:`Hello` and
:class:`Welcome`, requests share the connection, each with an id chosen by the client.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from omnirelay.content import MAX_MESSAGES, ChatMessage
from omnirelay.errors import ConfigError, MessageError
from omnirelay.events import AcceptedEvent, AudioEvent, CodecEvent, Event, TextEvent
from omnirelay.status import StatusReport
from omnirelay.tools import Choice, Tools
from omnirelay.values import (
    MAX_BIASES,
    ChunkFrames,
    ChunkSamples,
    FinishReason,
    JsonSchema,
    RequestId,
    SampledIds,
)

PROTOCOL_VERSION: Final = 1
LENGTH_BYTES: Final = 4
PIECE_BYTES: Final = 2**18
"""How much of a large frame is read or written at once."""
MAX_PIECE_BYTES: Final = 2**17
"""Most bytes of a request in one :class:`Piece`."""
MAX_STOPS: Final = 4
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
"""The answer ends where it would contain this text."""
MAX_PROMPT_IDS: Final = 2**20
"""More than any thinker takes."""
MAX_SAID_CHARACTERS: Final = 2**17
"""Of a text that is spoken as it is."""

ClientId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A client's id of a request, unique on its connection."""


class SamplingOverrides(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    repr_omit_defaults=True,
    omit_defaults=True,
):
    """Sampling parameters that differ from those of the released model; None keeps the default.

    Those after ``repetition_penalty`` are for text only.

    Attributes:
        max_tokens: Most tokens, 1 or more; capped at the gateway's limit, and at what fits after the prompt.
            Default: 1024 of text, 4096 of speech.
        min_tokens: Fewest tokens. Default: 0.
        temperature: 0 to 2; 0 is greedy, values between 0 and 0.01 count as 0.01. Default: 0 of text, 0.9 of
            speech.
        top_k: 0 to 2^20; 0 switches it off. Default: 0 of text, 40 of speech.
        top_p: Above 0, at most 1. Default: 1 of text, 0.8 of speech.
        repetition_penalty: 0.1 to 10; 1 switches it off. Default: 1 of text, 1.05 of speech.
        presence_penalty: -2 to 2; taken once from the logits of tokens that the answer has. Text only, as all
            below.
        frequency_penalty: -2 to 2; taken from them for each occurrence.
        min_p: 0 to 1: excludes tokens with less than this share of the likeliest token's probability.
        logit_bias: -100 to 100 by token id, added to the logits.
        logprobs: 0 to 20: ``text`` events have log probabilities, with so many of the likeliest tokens.
        json_schema: The text is JSON that this schema allows. Not with ``min_tokens``.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_BIASES)] | None = None
    logprobs: int | None = None
    json_schema: JsonSchema | None = None


DEFAULT_SAMPLING: Final = SamplingOverrides()
"""One object: msgspec omits a default that is the same object, not one that is equal."""


class PartialAnswer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """What a client holds of an answer that another request began, to go on from there.

    Attributes:
        request_id: That of the last ``accepted`` event; the request is cancelled if it is still open here.
        text_token_ids: Of its ``text`` events.
        text_finish_reason: Of its last ``text`` event; None if more text is to come.
        codec_token_ids: Of its ``codec`` events.
        codec_finish_reason: Of its last ``codec`` event; None if more codec tokens are to come.
        chunk_samples: Samples of each ``audio`` event.
    """

    request_id: RequestId
    text_token_ids: SampledIds = []
    text_finish_reason: FinishReason | None = None
    codec_token_ids: SampledIds = []
    codec_finish_reason: FinishReason | None = None
    chunk_samples: ChunkSamples = []


def partial_fields(event: Event) -> dict[str, Any]:
    """What an event adds to a :class:`PartialAnswer`, and the seed; lists are extended, other fields set."""
    fields: dict[str, Any] = {}
    if isinstance(event, AcceptedEvent):
        fields = {"request_id": event.request_id, "seed": event.seed}
    elif isinstance(event, TextEvent):
        fields = {"text_token_ids": event.token_ids, "text_finish_reason": event.finish_reason}
    elif isinstance(event, CodecEvent):
        fields = {"codec_token_ids": event.token_ids, "codec_finish_reason": event.finish_reason}
    elif isinstance(event, AudioEvent) and event.pcm:
        fields = {"chunk_samples": [event.sample_count]}
    return {name: value for name, value in fields.items() if value not in (None, [])}


class GenerateRequest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """One request, whichever API it came by.

    Defaults are not sent, so that gateways that do not know a field accept requests that do not use it.

    Attributes:
        messages: The conversation, rendered by the checkpoint's chat template.
        tools: Functions that the model may call. Without speech only, and with ``messages``.
        tool_choice: Whether a call must be made. A map names it: ``{"type": "function", "function": {"name":
            …}}``.
        prompt_text: The prompt as text, without the chat template.
        prompt_token_ids: The prompt itself, instead of ``messages``.
        speech: Answer with speech too.
        speaker: The voice. null: the checkpoint's default.
        streaming: Stream audio; else one piece at the end.
        text_sampling: Of text tokens.
        codec_sampling: Of codec ids.
        chunk_frames: Sizes of the pieces (docs/protocol.md#sizes-of-pieces) of streamed speech, in codec
            frames.
        stop: The text ends before the first of them. Without speech only.
        seed: Seeds text, speech and noise. null: a random one, which ``done`` returns.
        priority: Smaller is served first.
        deadline_s: Deadline; at most the gateway's own.
        use_audio_in_video: Use the audio of videos too.
        traceparent: The client's span for the request's trace (docs/traces.md#traces), as in W3C's header
            (https://www.w3.org/TR/trace-context/#traceparent-header).
        resumable: The events bring what a client needs to continue (docs/protocol.md#going-on-after-a-loss).
        resume: A partial answer to continue.
        say: Text that the model speaks as it is. With speech only; needs no prompt.
    """

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] = []
    tools: Tools = []
    tool_choice: Choice | None = None
    prompt_text: str | None = None
    prompt_token_ids: Annotated[list[int], Meta(max_length=MAX_PROMPT_IDS)] | None = None
    speech: bool = True
    speaker: str | None = None
    streaming: bool = True
    text_sampling: SamplingOverrides = DEFAULT_SAMPLING
    codec_sampling: SamplingOverrides = DEFAULT_SAMPLING
    chunk_frames: ChunkFrames = []
    stop: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] = []
    seed: int | None = None
    priority: int = 0
    deadline_s: float | None = None
    use_audio_in_video: bool = False
    traceparent: str | None = None
    resumable: bool = False
    resume: PartialAnswer | None = None
    say: Annotated[str, Meta(max_length=MAX_SAID_CHARACTERS)] | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello", omit_defaults=True):
    """First message of a client; unknown fields are ignored.

    Without a key, a gateway that requires keys answers status queries only.

    Attributes:
        version: 1.
        client: Name of the software.
        key: The client's API key (docs/access.md). Ignored by a gateway without keys.
    """

    version: int
    client: Annotated[str, Meta(max_length=256)] = ""
    key: Annotated[str, Meta(max_length=256)] | None = None

    def __repr__(self) -> str:
        """Omit the key."""
        return f"Hello(version={self.version}, client={self.client!r})"


class Submit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="submit"):
    """Start a request, a :class:`GenerateRequest` that is decoded separately: an invalid one fails alone.

    Attributes:
        id: The client's id of the request.
        request: A :class:`GenerateRequest`.
    """

    id: ClientId
    request: msgspec.Raw


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="piece", omit_defaults=True):
    """A part of a long request, so that other messages can be sent in between.

    Pieces follow each other without gaps, from offset 0 to the last; together they are the ``request`` of a
    :class:`Submit`.

    Attributes:
        id: The client's id of the request.
        offset: Where the piece begins: 0 for the first, then the end of the previous one.
        data: At most ``max_piece_bytes`` of ``welcome``. A gateway without that field accepts no pieces.
        last: The request is complete.
    """

    id: ClientId
    offset: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    data: bytes
    last: bool = False


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cancel"):
    """Cancel a request; ignored if it has ended, else an ``error`` event with code ``cancelled`` follows."""

    id: ClientId


class StatusQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="status"):
    """Ask for a status report, which has the same id."""

    id: ClientId


class Ping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ping"):
    """Ask whether the gateway is alive; only where ``welcome`` has ``resumes``."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The gateway's answer to :class:`Hello`, with the limits that a client can check before it sends.

    Gateways without media or pieces leave out those limits.

    Attributes:
        version: 1.
        max_frame_bytes: Longest frame from this client; a key may have its own limit.
        max_item_bytes: Largest media file.
        max_media_bytes: All files of a request together.
        max_piece_bytes: Longest ``data`` of a ``piece``.
        resumes: The gateway takes ``resumable``, ``resume`` and ``ping``. Missing: it does not.
    """

    version: int
    max_frame_bytes: int | None = None
    max_item_bytes: int | None = None
    max_media_bytes: int | None = None
    max_piece_bytes: int | None = None
    resumes: bool = False


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The next event of a request.

    Attributes:
        id: The client's id of the request.
        event: The next event.
    """

    id: ClientId
    event: Event


class StatusReply(msgspec.Struct, frozen=True, tag="status_reply"):
    """The answer to :class:`StatusQuery`."""

    id: ClientId
    report: StatusReport


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to :class:`Ping`."""


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    """A message of the client was rejected; the code is that of a class in :mod:`omnirelay.errors`.

    Attributes:
        code: ``message_invalid``, ``version_unsupported``, ``unauthenticated`` or ``busy``.
        message: What was wrong.
    """

    code: str
    message: str


ClientMessage = Hello | Submit | Piece | Cancel | StatusQuery | Ping
ServerMessage = Welcome | Reply | StatusReply | Pong | Refusal


def pack(message: ClientMessage | ServerMessage) -> bytes:
    """Encode a message as a frame."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def read_length(reader: asyncio.StreamReader, max_bytes: int) -> int:
    """Read the length of the next frame's body.

    Raises:
        MessageError: It exceeds ``max_bytes``; nothing was allocated.
        asyncio.IncompleteReadError: The connection was closed.
    """
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > max_bytes:
        raise MessageError(f"frame of {length} bytes, at most {max_bytes} are allowed")
    return length


async def read_pieces(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    """Read the body of a frame in pieces, as it arrives.

    Raises:
        asyncio.IncompleteReadError: The connection was closed.
    """
    while length:
        piece = await reader.read(min(length, PIECE_BYTES))
        if not piece:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(piece)
        yield piece


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytearray:
    """Read the body of the next frame.

    Raises:
        MessageError: It is longer than allowed; nothing was allocated.
        asyncio.IncompleteReadError: The connection was closed.
    """
    body = bytearray()
    async for piece in read_pieces(reader, await read_length(reader, max_bytes)):
        body += piece
    return body


def parse_tcp(address: str) -> tuple[str, int]:
    """Split ``tcp://HOST:PORT``.

    Raises:
        ConfigError: It is something else.
    """
    host, port, tls = parse_address(address)
    if tls:
        raise ConfigError(f"{address!r} is not tcp://HOST:PORT")
    return host, port


def tcp_address(host: str, port: int | str) -> str:
    """Join what :func:`parse_tcp` splits."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def parse_address(address: str) -> tuple[str, int, bool]:
    """Split ``tcp://HOST:PORT`` or ``tls://HOST:PORT`` into host, port and whether it is TLS.

    Raises:
        ConfigError: It is neither.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in ("tcp", "tls") or not host or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise ConfigError(f"{address!r} is not tcp://HOST:PORT or tls://HOST:PORT")
    return host.strip("[]"), int(port), scheme == "tls"
