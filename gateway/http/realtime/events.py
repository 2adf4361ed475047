"""What a client says: events by type, read and checked."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.http.body import read_object
from gateway.http.fields import convert
from omnirelay.errors import InvalidRequestError, UnsupportedError


class ClientEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One event.

    Attributes:
        type: Its name.
        event_id: The client's name of it; errors repeat it.
    """

    type: str
    event_id: str | None = None


class SessionUpdate(ClientEvent, frozen=True):
    """Change the session's settings."""

    session: dict[str, Any]


class AppendAudio(ClientEvent, frozen=True):
    """More of what the user says; base64 in JSON."""

    audio: bytes


class CommitAudio(ClientEvent, frozen=True):
    """The user has finished: what was appended becomes an item."""


class ClearAudio(ClientEvent, frozen=True):
    """Forget what was appended."""


class CreateItem(ClientEvent, frozen=True):
    """Add an item to the conversation; at its end, behind the item named, or first (``root``)."""

    item: dict[str, Any]
    previous_item_id: str | None = None


class DeleteItem(ClientEvent, frozen=True):
    """Forget an item."""

    item_id: str


class TruncateItem(ClientEvent, frozen=True):
    """Forget what of an answer was not heard any more."""

    item_id: str
    content_index: int
    audio_end_ms: int


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer has of its own, besides settings that differ from the session's.

    Attributes:
        conversation: ``none`` does not add the answer to the conversation.
        input: Items to answer instead of the conversation.
        metadata: Told back in the answer.
    """

    conversation: Literal["auto", "none"] = "auto"
    input: list[dict[str, Any]] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


class CreateResponse(ClientEvent, frozen=True):
    """Answer."""

    response: dict[str, Any] | None = None


class CancelResponse(ClientEvent, frozen=True):
    """Stop answering."""

    response_id: str | None = None


_KINDS: Final[dict[str, type[ClientEvent]]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AppendAudio,
    "input_audio_buffer.commit": CommitAudio,
    "input_audio_buffer.clear": ClearAudio,
    "conversation.item.create": CreateItem,
    "conversation.item.delete": DeleteItem,
    "conversation.item.truncate": TruncateItem,
    "response.create": CreateResponse,
    "response.cancel": CancelResponse,
}
_UNSUPPORTED: Final = frozenset({"conversation.item.retrieve", "output_audio_buffer.clear"})


class EventError(Exception):
    """An event that cannot be read.

    Args:
        error: What is wrong.
        event_id: The client's name of the event, if it can be found.
    """

    def __init__(self, error: InvalidRequestError, event_id: str | None) -> None:
        super().__init__(str(error))
        self.error: Final = error
        self.event_id: Final = event_id


def read_event(text: str) -> ClientEvent:
    """Read an event; takes long for a large one.

    Args:
        text: JSON.

    Raises:
        EventError: It is none that is known here.
    """
    event_id = None
    try:
        values = read_object(bytearray(text, "utf-8", "surrogatepass"))
        given = values.get("event_id")
        event_id = given[:512] if isinstance(given, str) else None
        kind = values.get("type")
        if isinstance(kind, str) and kind in _UNSUPPORTED:
            raise UnsupportedError(f"{kind} is not supported", "type")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InvalidRequestError(f"there is no event of type {str(kind)[:64]!r}", "type")
        return convert(values, _KINDS[kind])
    except InvalidRequestError as error:
        raise EventError(error, event_id) from error
