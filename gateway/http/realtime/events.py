"""The events of a client, parsed and checked by type, and how a session reaches its client."""

import binascii
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.http.body import read_object
from gateway.http.fields import convert
from gateway.http.realtime.conversation import MAX_ITEMS
from omnirelay.errors import InvalidRequestError
from omnirelay.values import Count

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
"""Within OpenAI's limits: it is kept as long as its response, and not weighed."""


class ClientEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """An event; errors repeat its ``event_id``."""

    event_id: str | None = None


class SessionUpdate(ClientEvent, frozen=True, tag="session.update"):
    """Change the settings of the session."""

    session: dict[str, Any]


class AppendAudio(ClientEvent, frozen=True, tag="input_audio_buffer.append"):
    """Append audio, base64 in JSON."""

    audio: bytes


class CommitAudio(ClientEvent, frozen=True, tag="input_audio_buffer.commit"):
    """Make an item of the appended audio."""


class ClearAudio(ClientEvent, frozen=True, tag="input_audio_buffer.clear"):
    """Discard the appended audio."""


class AppendVideo(ClientEvent, frozen=True, tag="input_video_buffer.append"):
    """Append a frame, a JPEG or PNG file as base64.

    Attributes:
        time_ms: When it was taken, counted as appended audio is; by default now, at its end.
    """

    image: bytes
    time_ms: Count | None = None


class ClearVideo(ClientEvent, frozen=True, tag="input_video_buffer.clear"):
    """Forget the frames."""


class CreateItem(ClientEvent, frozen=True, tag="conversation.item.create"):
    """Insert an item at the end, after another one, or at the beginning (``root``)."""

    item: dict[str, Any]
    previous_item_id: str | None = None


class DeleteItem(ClientEvent, frozen=True, tag="conversation.item.delete"):
    """Delete an item."""

    item_id: str


class RetrieveItem(ClientEvent, frozen=True, tag="conversation.item.retrieve"):
    """Return an item."""

    item_id: str


class TruncateItem(ClientEvent, frozen=True, tag="conversation.item.truncate"):
    """Delete the part of an answer that was not played."""

    item_id: str
    content_index: int
    audio_end_ms: int


class ClearOutput(ClientEvent, frozen=True, tag="output_audio_buffer.clear"):
    """Stop playing, where the gateway does."""


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one response, besides settings that override the session's.

    Attributes:
        conversation: ``none`` leaves the answer out of the conversation.
        input: Items to answer instead of the conversation.
        metadata: Returned in the response.
    """

    conversation: Literal["auto", "none"] = "auto"
    input: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)] | None = None
    metadata: Metadata | None = None


class CreateResponse(ClientEvent, frozen=True, tag="response.create"):
    """Generate a response."""

    response: dict[str, Any] | None = None


class CancelResponse(ClientEvent, frozen=True, tag="response.cancel"):
    """Cancel the response."""

    response_id: str | None = None


_KINDS: Final = {str(kind.__struct_config__.tag): kind for kind in ClientEvent.__subclasses__()}


def read_event(text: str) -> tuple[str | None, ClientEvent | InvalidRequestError]:
    """Return the id of an event, if it has one, and the event or why it is invalid; slow for a large one."""
    event_id = None
    try:
        values = read_object(bytearray(text, "utf-8", "surrogatepass"), "the event")
        given = values.get("event_id")
        event_id = given[:512] if isinstance(given, str) else None
        kind = values.get("type")
        if kind is None:
            raise InvalidRequestError("type is missing: it says which event this is", "type")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InvalidRequestError(f"there is no event of type {str(kind)[:64]!r}", "type")
        event: ClientEvent = convert(values, _KINDS[kind], what="the event")
        return event.event_id, event
    except InvalidRequestError as error:
        return event_id, error


Send = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Sends an event of a type with fields; raises ClientGoneError if the client disconnected."""


class Played(NamedTuple):
    """How much of an answer's speech was played.

    Attributes:
        place: The ids of the answer, as in its events.
        ms: Rounded down.
    """

    place: dict[str, Any]
    ms: int


class Transport:
    """Takes the events and the speech of a session's answers to its client: here speech in events, as base64.

    Attributes:
        plays: It plays the speech, rather than the client.
        send: Sends an event.
    """

    plays: bool = False

    def __init__(self, send: Send) -> None:
        self.send: Final[Send] = send

    async def send_audio(self, place: dict[str, Any], pcm: bytes, start_delay_ms: int) -> None:
        """Send a piece of an answer's speech.

        Args:
            place: The ids of the answer, as in its events.
            pcm: Whole samples: int16, little-endian, mono, 24 kHz; codes of G.711, where the client plays it
                and the session says so.
            start_delay_ms: How long to wait before it is played; 0 but for the first piece.

        Raises:
            ClientGoneError: The client disconnected.
        """
        told = {**place, "delta": binascii.b2a_base64(pcm, newline=False).decode()}
        if start_delay_ms:
            told["start_delay_ms"] = start_delay_ms
        await self.send("response.output_audio.delta", told)

    def stop_audio(self) -> list[Played]:
        """Stop playing, and return what was played of each answer that is cut; none if the client plays."""
        return []
