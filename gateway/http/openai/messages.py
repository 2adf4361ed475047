"""Messages of a chat in OpenAI's and vLLM's form, and calls in them, converted to the gateway's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from gateway.http.fields import convert_given
from gateway.http.openai.strings import LongStrings
from gateway.input.tools import BEGIN, END
from omnirelay.content import AudioPart, ChatMessage, ContentPart, ImagePart, Role, TextPart, VideoPart
from omnirelay.errors import InvalidRequestError, UnsupportedError
from omnirelay.tools import MAX_TOOLS, Call, result_text


class PastFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that was called."""

    name: str
    arguments: str

    @property
    def text(self) -> str:
        """The call as the model wrote it."""
        try:
            arguments: Any = msgspec.Raw(msgspec.json.encode(msgspec.json.decode(self.arguments)))
        except (msgspec.DecodeError, RecursionError):
            arguments = self.arguments
        call = msgspec.json.encode({"name": self.name, "arguments": arguments}).decode()
        return f"{BEGIN}\n{call}\n{END}"


class PastCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call in an earlier message."""

    function: PastFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: Any = None


def call_object(request_id: str, number: int, call: Call) -> dict[str, Any]:
    """Build OpenAI's form of a call, the first of which has number 0."""
    function: Mapping[str, str] = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{request_id}_{number}", "type": "function", "function": function}


ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}

Kept = Callable[[str], str | None]
"""Gives the text of a spoken answer by the id of its audio; none if it is not kept."""


class _StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct without further fields."""


class SpokenAnswer(msgspec.Struct, frozen=True):
    """Speech of an earlier answer, by its transcript or by its id alone."""

    id: str | None = None
    transcript: str | None = None


class Message(_StrictStruct, frozen=True, kw_only=True):
    """OpenAI's message; fields of type ``Any`` are ignored, but for ``function_call``."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    audio: SpokenAnswer | None = None
    refusal: str | None = None
    annotations: Any = None
    name: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    cache_control: Any = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Any = None
    tool_call_id: str | None = None


class _Url(_StrictStruct, frozen=True):
    url: str
    detail: str | None = None


class _AudioFile(_StrictStruct, frozen=True):
    data: str
    format: str


class _Part(_StrictStruct, frozen=True, kw_only=True, tag_field="type"):
    prompt_cache_breakpoint: Any = None
    cache_control: Any = None


class _PlainTextPart(_Part, frozen=True, kw_only=True, tag="text"):
    text: str


class _SoundPart(_Part, frozen=True, kw_only=True, tag="input_audio"):
    input_audio: _AudioFile


class _AudioUrlPart(_Part, frozen=True, kw_only=True, tag="audio_url"):
    audio_url: _Url


class _ImageUrlPart(_Part, frozen=True, kw_only=True, tag="image_url"):
    image_url: _Url


class _VideoUrlPart(_Part, frozen=True, kw_only=True, tag="video_url"):
    video_url: _Url


_AnyPart = _PlainTextPart | _SoundPart | _AudioUrlPart | _ImageUrlPart | _VideoUrlPart
_TYPES: Final = tuple(str(kind.__struct_config__.tag) for kind in get_args(_AnyPart))


def read_message(message: Message, strings: LongStrings, where: str, kept: Kept) -> ChatMessage:
    """Convert a message, found at ``where`` in the request.

    Args:
        kept: Gives the texts of earlier answers.

    Raises:
        UnsupportedError: It has something that is not supported.
        InvalidRequestError: It is invalid.
    """
    if message.function_call is not None or message.role == "function":
        name = "role" if message.role == "function" else "function_call"
        raise UnsupportedError(f"{where}: send tool_calls and the role tool instead", f"{where}.{name}")
    if message.role == "tool":
        texts = "".join(_only_text(part, where) for part in _parts(message, strings, where, kept))
        return ChatMessage("user", result_text(texts))
    if message.role not in ROLES:
        raise InvalidRequestError(f"{where}: there is no role {message.role[:64]!r}", f"{where}.role")
    if not message.tool_calls:
        return ChatMessage(ROLES[message.role], _content(message, strings, where, kept))
    if message.role != "assistant":
        raise InvalidRequestError(f"{where}: only the assistant calls tools", f"{where}.tool_calls")
    said = [] if message.content in (None, "", []) else _parts(message, strings, where, kept)
    calls = "\n".join(
        PastFunction(call.function.name, strings.text(call.function.arguments)).text
        for call in message.tool_calls
    )
    return ChatMessage("assistant", [*said, TextPart(f"\n{calls}" if said else calls)])


def joined_results(messages: Sequence[Message], read: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Join the results of tools that follow each other to one turn."""
    turns: list[list[ChatMessage]] = []
    after_result = False
    for message, each in zip(messages, read, strict=True):
        if after_result and message.role == "tool":
            turns[-1].append(each)
        else:
            turns.append([each])
        after_result = message.role == "tool"
    # Each turn is joined once: one by one takes time that grows with the square of their number.
    return [
        turn[0] if len(turn) == 1 else ChatMessage("user", "\n".join(str(each.content) for each in turn))
        for turn in turns
    ]


def _parts(message: Message, strings: LongStrings, where: str, kept: Kept) -> Sequence[ContentPart]:
    content = _content(message, strings, where, kept)
    return [TextPart(content)] if isinstance(content, str) else content


def _only_text(part: ContentPart, where: str) -> str:
    if not isinstance(part, TextPart):
        raise UnsupportedError(f"{where}: a tool's result can only be text", f"{where}.content")
    return part.text


def _content(message: Message, strings: LongStrings, where: str, kept: Kept) -> str | list[ContentPart]:
    # LangChain sends an empty text beside the audio.
    if not message.content and message.audio is not None:
        if message.audio.transcript is not None:
            return strings.text(message.audio.transcript)
        text = kept(message.audio.id or "")
        if text is None:
            raise InvalidRequestError(
                f"{where}: no answer is kept under this id: send its transcript, or the text as content",
                f"{where}.audio",
            )
        return text
    if isinstance(message.content, list):
        return [_part(part, strings, f"{where}.content[{at}]") for at, part in enumerate(message.content)]
    if (said := message.refusal if message.content is None else message.content) is not None:
        return strings.text(said)
    raise InvalidRequestError(f"{where} has no content", f"{where}.content")


def _part(part: dict[str, Any], strings: LongStrings, where: str) -> ContentPart:
    if (kind := part.get("type")) not in _TYPES:
        raise InvalidRequestError(
            f"{where}.type can be {', '.join(_TYPES)}, not {str(kind)[:64]!r}", f"{where}.type"
        )
    given: _AnyPart = convert_given(part, _AnyPart, where)
    match given:
        case _PlainTextPart():
            return TextPart(strings.text(given.text))
        case _SoundPart(input_audio=sound):
            if sound.format in {"pcm", "pcm16"}:
                raise UnsupportedError(
                    f"{where}: raw samples are not supported: send a wav file", f"{where}.input_audio.format"
                )
            # The declared format is not needed: the decoder detects it.
            return strings.media(AudioPart, sound.data, f"{where}.input_audio.data")
        case _AudioUrlPart():
            return strings.media(AudioPart, given.audio_url.url)
        case _ImageUrlPart():
            # ``detail`` is ignored: the model always gets the full resolution.
            return strings.media(ImagePart, given.image_url.url)
        case _VideoUrlPart():
            return strings.media(VideoPart, given.video_url.url)
