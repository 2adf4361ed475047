"""The items of a conversation."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.fairness.quota import Hold
from gateway.http.encoding.encoders import wav_header
from gateway.http.fields import convert, named, require_one_of
from gateway.http.openai.messages import PastFunction
from gateway.http.realtime.audio import BYTES_PER_S, Format, InputDecoder, SentSpeech, decoded_size
from gateway.input.urls import is_data_url, parse_https
from omnirelay.content import (
    AudioPart,
    ChatMessage,
    ContentPart,
    ImagePart,
    MediaPart,
    Role,
    TextPart,
    parts_of,
)
from omnirelay.errors import InvalidRequestError, MediaTooLargeError, UnsupportedError
from omnirelay.tools import result_text
from omnirelay.values import PlainName

MAX_PARTS: Final = 64
MAX_SOUND_BYTES: Final = 12 * 2**20
"""Samples of a sound that is sent with its item: as many as one event can have as PCM."""

Status = Literal["in_progress", "completed", "incomplete"]


MAX_TEXT: Final = 2**20
"""Characters of arguments, and of a result."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
ShortId = Annotated[str, Meta(min_length=1, max_length=64)]


def new_call_id() -> str:
    """Return an id that no call has."""
    return f"call_{secrets.token_hex(8)}"


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """Fields of all items; those of clients besides ``id`` change nothing."""

    id: ShortId | None = None
    object: ShortId | None = None
    status: ShortId | None = None

    @property
    def shown(self) -> dict[str, str]:
        """The fields that clients see."""
        values: dict[str, str] = msgspec.to_builtins(self)
        return {name: each for name, each in values.items() if name not in _Fields.__struct_fields__}


class FunctionCall(_Fields, frozen=True, tag="function_call"):
    """A call of the model."""

    role: ClassVar[Role] = "assistant"
    name: PlainName
    arguments: Text
    call_id: ShortId = msgspec.field(default_factory=new_call_id)

    @property
    def text(self) -> str:
        """The call as the model wrote it."""
        return PastFunction(self.name, self.arguments).text


class FunctionOutput(_Fields, frozen=True, tag="function_call_output"):
    """What a function returned."""

    role: ClassVar[Role] = "user"
    call_id: ShortId
    output: Text

    @property
    def text(self) -> str:
        """The result as the model reads it."""
        return result_text(self.output)


FunctionItem = FunctionCall | FunctionOutput


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    audio: bytes | None = None
    transcript: str | None = None
    image_url: str | None = None
    detail: str | None = None


class _ItemFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    role: Role
    content: Annotated[list[_Content], Meta(min_length=1, max_length=MAX_PARTS)]
    type: Literal["message"] = "message"
    id: ShortId | None = None
    object: str | None = None
    status: str | None = None


def new_session_id() -> str:
    """Return an id that no session has."""
    return f"sess_{secrets.token_hex(10)}"


def new_item_id() -> str:
    """Return an id that no item has."""
    return f"item_{secrets.token_hex(10)}"


@dataclass(eq=False)
class Item:
    """One message of the conversation, a call, or its result.

    Attributes:
        role: The speaker.
        parts: Its content for the model.
        content: Its content for clients.
        speech: The speech of an answer that was sent; none if it is not spoken.
        function: What clients see of a call or result instead of role and content; none of a message.
        recording: What remains of the parts if they have a video and it is forgotten; or what is transcribed
            though it is not kept.
        video_tokens: An upper estimate of those of its video's pictures.
        answered: It was in the prompt of an answer, so that its media can be read.
    """

    role: Role
    parts: Sequence[ContentPart]
    content: list[dict[str, Any]]
    id: str = field(default_factory=new_item_id)
    status: Status = "completed"
    speech: SentSpeech | None = None
    function: FunctionItem | None = None
    hold: Hold | None = None
    recording: Sequence[ContentPart] = ()
    video_tokens: int = 0
    answered: bool = False

    @property
    def weight(self) -> int:
        """Its approximate size in a request, with what only clients see."""
        kept = [text for each in self.content for text in each.values() if isinstance(text, str)]
        kept += [] if self.function is None else self.function.shown.values()
        return sum(map(len, kept)) + sum(
            len(part.text) if isinstance(part, TextPart) else part.nbytes + len(part.url or "")
            for part in self.parts
        )

    @property
    def memory(self) -> int:
        """Its approximate size in memory."""
        return self.weight + sum(part.nbytes for part in self.recording if isinstance(part, MediaPart))

    def keep(self, held: Hold, hold: Hold | None = None) -> None:
        """Reserve its memory.

        Raises:
            BusyError: Memory is short.
        """
        self.hold = hold or held.split(0)
        self.hold.grow(max(0, self.memory - self.hold.size))

    def shrink_hold(self) -> None:
        """Release the memory of what it does not have any more."""
        if self.hold is not None:
            self.hold.shrink(max(0, self.hold.size - self.memory))

    def forget_video(self) -> None:
        """Keep what was heard of what was seen and heard."""
        self.parts, self.recording, self.video_tokens = self.recording, (), 0
        self.shrink_hold()

    def forget_media(self) -> None:
        """Keep the texts, and of a video the sound."""
        if self.video_tokens:
            self.forget_video()
        else:
            self.parts = [part for part in self.parts if isinstance(part, TextPart)]
            self.shrink_hold()

    def release(self) -> None:
        """Release its memory: of what waits for its transcript, too."""
        self.parts, self.recording = [], ()
        if self.hold is not None:
            self.hold.release()

    def shown(self) -> dict[str, Any]:
        """Return it in OpenAI's form, without sounds and pictures."""
        head = {"id": self.id, "object": "realtime.item", "status": self.status}
        if self.function is not None:
            return {**head, **self.function.shown}
        return {**head, "type": "message", "role": self.role, "content": self.content}

    def truncate(self, content_index: int, audio_end_ms: int) -> None:
        """Cut a spoken answer, and its transcript where its speech is.

        Raises:
            InvalidRequestError: It has no speech, or less.
        """
        if self.speech is None or content_index != 0:
            raise InvalidRequestError(
                f"{self.id} has no speech at content_index {content_index}", "content_index"
            )
        length_ms = self.speech.ms
        if not 0 <= audio_end_ms <= length_ms:
            raise InvalidRequestError(
                f"audio_end_ms is {audio_end_ms}, the speech of {self.id} has {length_ms} ms", "audio_end_ms"
            )
        text = "".join(part.text for part in self.parts if isinstance(part, TextPart))
        heard = self.speech.cut(text, audio_end_ms)
        self.parts = [TextPart(heard)] if heard else []
        self.content = [{"type": "output_audio", "transcript": heard}]


def read_item(values: Mapping[str, Any], where: str, audio_format: Format = "audio/pcm") -> Item:
    """Parse and check a client's item, found at ``where`` in its event; its sounds are of a format.

    Raises:
        UnsupportedError: It is of another type.
        InvalidRequestError: It is invalid.
    """
    kind = values.get("type", "message")
    if kind == "function_call":
        return function_item(convert(values, FunctionCall, where))
    if kind == "function_call_output":
        return function_item(convert(values, FunctionOutput, where))
    if kind != "message":
        allowed = "message, function_call or function_call_output"
        raise UnsupportedError(f"{where}.type can be {allowed}, not {str(kind)[:64]!r}", f"{where}.type")
    message = convert(values, _ItemFields, where)
    parts = [
        _part(message.role, content, f"{where}.content[{at}]", audio_format)
        for at, content in enumerate(message.content)
    ]
    item = Item(message.role, parts, [_shown(each) for each in message.content])
    item.id = message.id or item.id
    return item


def function_item(function: FunctionItem) -> Item:
    """Build the item of a call or result."""
    item_id = function.id or new_item_id()
    return Item(function.role, [TextPart(function.text)], [], id=item_id, function=function)


def messages_of(items: Iterable[Item]) -> list[ChatMessage]:
    """Return items in the gateway's form, without those that have no content.

    Calls join what the model said before them, and results each other, as in a chat.
    """
    messages: list[ChatMessage] = []
    before: Item | None = None
    for item in items:
        if not item.parts:
            continue
        parts = list(item.parts)
        if before is not None and _joins(before, item):
            parts = [*parts_of(messages.pop()), TextPart("\n"), *parts]
        messages.append(ChatMessage(item.role, parts))
        before = item
    return messages


def _joins(before: Item, item: Item) -> bool:
    if isinstance(item.function, FunctionCall):
        return before.role == "assistant"
    return isinstance(item.function, FunctionOutput) and isinstance(before.function, FunctionOutput)


class Recorded(NamedTuple):
    """What was heard, and seen meanwhile.

    Attributes:
        parts: For the model: a recording alone; or a video with its sound, and before it the sound of what
            was seen too long ago.
        video_tokens: An upper estimate of those of the pictures; 0 if nothing was seen.
    """

    parts: Sequence[ContentPart]
    video_tokens: int = 0


def sound_item(wav: bytearray, item_id: str, recorded: Recorded) -> Item:
    """Build an item of what the user said, and the camera saw meanwhile."""
    content = [{"type": "input_audio", "transcript": None}]
    item = Item("user", recorded.parts, content, id=item_id, video_tokens=recorded.video_tokens)
    if recorded.video_tokens:
        item.recording = [AudioPart(data=memoryview(wav))]
    return item


def _part(role: Role, content: _Content, where: str, audio_format: Format) -> ContentPart:
    if role == "assistant":
        said = content.transcript if content.type in {"output_audio", "audio"} else content.text
        require_one_of(f"{where}.type", content.type, {"output_text", "text", "output_audio", "audio"})
        return TextPart(_given(said, f"{where}: its text or transcript"))
    require_one_of(f"{where}.type", content.type, _USER if role == "user" else {"input_text"})
    if content.type == "input_text":
        return TextPart(_given(content.text, f"{where}.text"))
    if content.type == "input_image":
        require_one_of(f"{where}.detail", content.detail, {"auto", "high"})
        place = f"{where}.image_url"
        if not is_data_url(url := _given(content.image_url, place)):
            with named({"messages": place}):
                parse_https(place, url)
        return ImagePart(url=url)
    given = content.audio or b""
    if decoded_size(given, audio_format) > MAX_SOUND_BYTES:
        raise MediaTooLargeError(
            f"{where}.audio is limited to {MAX_SOUND_BYTES // BYTES_PER_S} s: append it to the input buffer",
            f"{where}.audio",
        )
    samples = b"".join(InputDecoder().decode(given, audio_format))
    if not samples or len(samples) % 2:
        raise InvalidRequestError(
            f"{where}.audio: {len(samples)} bytes are not 16-bit samples", f"{where}.audio"
        )
    return AudioPart(data=memoryview(wav_header(len(samples)) + samples))


_USER: Final = frozenset({"input_text", "input_audio", "input_image"})


def _given(value: str | None, where: str) -> str:
    if value is None:
        raise InvalidRequestError(f"{where} is missing", where)
    return value


def _shown(content: _Content) -> dict[str, Any]:
    """Return what clients see of a part: of text and transcript what its type has."""
    name = "transcript" if "audio" in content.type else "text"
    said = getattr(content, name)
    return {"type": content.type} | ({} if said is None else {name: said})


def media_kinds(item: Item) -> list[str]:
    """Return the kinds of its sounds and pictures."""
    return [part.kind for part in item.parts if isinstance(part, MediaPart)]
