"""The events of a client, parsed and checked by type."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.http.body import read_object
from gateway.http.fields import convert
from omnirelay.errors import InvalidRequestError


class ClientEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An event; errors repeat its ``event_id``."""

    type: str
    event_id: str | None = None


class SessionUpdate(ClientEvent, frozen=True):
    """Change the settings of the session."""

    session: dict[str, Any]


class AppendAudio(ClientEvent, frozen=True):
    """Append audio, base64 in JSON."""

    audio: bytes


class CommitAudio(ClientEvent, frozen=True):
    """Make an item of the appended audio."""


class ClearAudio(ClientEvent, frozen=True):
    """Discard the appended audio."""


class CreateItem(ClientEvent, frozen=True):
    """Insert an item at the end, after another one, or at the beginning (``root``)."""

    item: dict[str, Any]
    previous_item_id: str | None = None


class DeleteItem(ClientEvent, frozen=True):
    """Delete an item."""

    item_id: str


class RetrieveItem(ClientEvent, frozen=True):
    """Return an item."""

    item_id: str


class TruncateItem(ClientEvent, frozen=True):
    """Delete the part of an answer that was not played."""

    item_id: str
    content_index: int
    audio_end_ms: int


class ClearOutput(ClientEvent, frozen=True):
    """Stop playing, where the gateway does."""


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one response, besides settings that override the session's.

    Attributes:
        conversation: ``none`` leaves the answer out of the conversation.
        input: Items to answer instead of the conversation.
        metadata: Returned in the response.
    """

    conversation: Literal["auto", "none"] = "auto"
    input: list[dict[str, Any]] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


class CreateResponse(ClientEvent, frozen=True):
    """Generate a response."""

    response: dict[str, Any] | None = None


class CancelResponse(ClientEvent, frozen=True):
    """Cancel the response."""

    response_id: str | None = None


_KINDS: Final[dict[str, type[ClientEvent]]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AppendAudio,
    "input_audio_buffer.commit": CommitAudio,
    "input_audio_buffer.clear": ClearAudio,
    "conversation.item.create": CreateItem,
    "conversation.item.delete": DeleteItem,
    "conversation.item.retrieve": RetrieveItem,
    "conversation.item.truncate": TruncateItem,
    "response.create": CreateResponse,
    "response.cancel": CancelResponse,
    "output_audio_buffer.clear": ClearOutput,
}


class EventError(Exception):
    """An invalid event, with its id if that could be parsed."""

    def __init__(self, error: InvalidRequestError, event_id: str | None) -> None:
        super().__init__(str(error))
        self.error: Final = error
        self.event_id: Final = event_id


def read_event(text: str) -> ClientEvent:
    """Parse and check an event; slow for a large one.

    Raises:
        EventError: It is invalid.
    """
    event_id = None
    try:
        values = read_object(bytearray(text, "utf-8", "surrogatepass"))
        given = values.get("event_id")
        event_id = given[:512] if isinstance(given, str) else None
        kind = values.get("type")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InvalidRequestError(f"there is no event of type {str(kind)[:64]!r}", "type")
        return convert(values, _KINDS[kind])
    except InvalidRequestError as error:
        raise EventError(error, event_id) from error
