"""What clients and the gateway say to each other over TCP.

A frame is four bytes of length, big-endian, and that many bytes of msgpack.  The client begins with
:class:`Hello`, the gateway answers :class:`Welcome`; then any number of requests share the connection,
each tagged by an id that the client chooses.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from omnirelay.content import MAX_MESSAGES, ChatMessage
from omnirelay.errors import ConfigError, MessageError
from omnirelay.events import Event
from omnirelay.status import StatusReport

PROTOCOL_VERSION: Final = 1
LENGTH_BYTES: Final = 4
PIECE_BYTES: Final = 2**18
"""Of a large frame, how much is read or written at once, so that everybody gets a turn."""
MAX_PIECE_BYTES: Final = 2**17
"""Of a request that is sent in pieces, how much may be in one message."""
MAX_PROMPT_IDS: Final = 2**20
"""As many as the thinker could ever be given."""

ClientId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A client's name of a request, unique among its own requests on the connection."""


class SamplingOverrides(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Changes to how tokens are drawn; none keeps the default of the released model.

    The fields are those of :class:`shared.messages.Sampling`.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None


DEFAULT_SAMPLING: Final = SamplingOverrides()
"""One object: msgspec omits a default that is the same object, not one that is equal."""


class GenerateRequest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """One request, whatever the way it came in.

    Defaults are not sent, so that a gateway that does not know a field yet takes requests that do without it.

    Attributes:
        messages: The conversation; the checkpoint's chat template makes the prompt of it.
        prompt_token_ids: The prompt itself, instead of ``messages``.
        speech: Answer with speech too.
        speaker: Name of the voice; none takes the checkpoint's default.
        streaming: Send audio while it is made; else in one piece at the end.
        text_sampling: How text is drawn; the default is greedy.
        codec_sampling: How speech is drawn; the default is that of the released model.
        seed: Makes the request repeatable; none draws one.
        priority: Smaller is served first.
        deadline_s: The request expires when it has not ended by then; at most the gateway's own limit.
        use_audio_in_video: The sound of the videos is heard too.
        traceparent: The client's own span in the form of W3C's header of that name; the request's trace goes
            on from there.  What has not that form is passed over.
    """

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] = []
    prompt_token_ids: Annotated[list[int], Meta(max_length=MAX_PROMPT_IDS)] | None = None
    speech: bool = True
    speaker: str | None = None
    streaming: bool = True
    text_sampling: SamplingOverrides = DEFAULT_SAMPLING
    codec_sampling: SamplingOverrides = DEFAULT_SAMPLING
    seed: int | None = None
    priority: int = 0
    deadline_s: float | None = None
    use_audio_in_video: bool = False
    traceparent: str | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello", omit_defaults=True):
    """First message of a client; fields that a later version adds are ignored.

    Attributes:
        version: The :data:`PROTOCOL_VERSION` it speaks.
        client: Name of its software, for the gateway's log.
        key: Its API key.  Without one, a gateway that asks for keys tells its status and nothing else.
    """

    version: int
    client: Annotated[str, Meta(max_length=256)] = ""
    key: Annotated[str, Meta(max_length=256)] | None = None

    def __repr__(self) -> str:
        """Show it without the key."""
        return f"Hello(version={self.version}, client={self.client!r})"


class Submit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="submit"):
    """Answer this.

    Attributes:
        id: The client's name of the request.
        request: A :class:`GenerateRequest`, read separately so that a wrong one ends only itself.
    """

    id: ClientId
    request: msgspec.Raw


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="piece", omit_defaults=True):
    """A part of a long request, so that other messages need not wait for all of it.

    Attributes:
        id: The client's name of the request.
        offset: Where it begins; 0 begins a request, and each other piece begins where the last one ended.
        data: Of what would be the ``request`` of :class:`Submit`.
        last: The request is complete.
    """

    id: ClientId
    offset: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    data: bytes
    last: bool = False


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cancel"):
    """Stop answering this; nothing happens if it has ended."""

    id: ClientId


class StatusQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="status"):
    """Tell how the stack is."""

    id: ClientId


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The gateway's answer to :class:`Hello`: what a client can check before it sends.

    A gateway that takes no media does not tell the limits.

    Attributes:
        version: The :data:`PROTOCOL_VERSION` it speaks.
        max_frame_bytes: Longest frame that it reads.
        max_item_bytes: Largest file of a sound, picture or video.
        max_media_bytes: All files of a request together.
        max_piece_bytes: Longest ``data`` of a :class:`Piece`; none from gateways that know no pieces.
    """

    version: int
    max_frame_bytes: int | None = None
    max_item_bytes: int | None = None
    max_media_bytes: int | None = None
    max_piece_bytes: int | None = None


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The next event of a request."""

    id: ClientId
    event: Event


class StatusReply(msgspec.Struct, frozen=True, tag="status_reply"):
    """The answer to :class:`StatusQuery`."""

    id: ClientId
    report: StatusReport


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    """A message of the client could not be understood.

    Attributes:
        code: The ``code`` of a class in :mod:`omnirelay.errors`.
        message: What was wrong.
    """

    code: str
    message: str


ClientMessage = Hello | Submit | Piece | Cancel | StatusQuery
ServerMessage = Welcome | Reply | StatusReply | Refusal


def pack(message: ClientMessage | ServerMessage) -> bytes:
    """Give the frame of a message."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def read_length(reader: asyncio.StreamReader, max_bytes: int) -> int:
    """Read how long the body of the next frame is.

    Raises:
        MessageError: Longer than allowed; nothing was allocated for it.
        asyncio.IncompleteReadError: The connection was closed.
    """
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > max_bytes:
        raise MessageError(f"frame of {length} bytes, at most {max_bytes} are allowed")
    return length


async def read_pieces(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    """Read the body of a frame, piece by piece as it arrives.

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
        MessageError: It is announced to be longer than allowed; nothing was allocated for it.
        asyncio.IncompleteReadError: The connection was closed.
    """
    body = bytearray()
    async for piece in read_pieces(reader, await read_length(reader, max_bytes)):
        body += piece
    return body


def parse_tcp(address: str) -> tuple[str, int]:
    """Split ``tcp://HOST:PORT``.

    Raises:
        ConfigError: It is nothing of the kind.
    """
    host, port, tls = parse_address(address)
    if tls:
        raise ConfigError(f"{address!r} is not tcp://HOST:PORT")
    return host, port


def parse_address(address: str) -> tuple[str, int, bool]:
    """Split ``tcp://HOST:PORT`` or ``tls://HOST:PORT``.

    Returns:
        Host, port, and whether TLS is spoken there.

    Raises:
        ConfigError: It is neither.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in ("tcp", "tls") or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{address!r} is not tcp://HOST:PORT or tls://HOST:PORT")
    return host.strip("[]"), int(port), scheme == "tls"
