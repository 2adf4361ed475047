"""From what a program passes to ``chat`` to the request that is sent."""

# help() then shows the names of types, not their long unions.
from __future__ import annotations

import base64
import binascii
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Concatenate, Final, Literal, NoReturn, ParamSpec, Protocol, TypeVar

import msgspec

from omnirelay.client.media import AudioSource, ImageSource, VideoSource, content
from omnirelay.content import AudioPart, ChatMessage, ContentPart, ImagePart, Role, TextPart, VideoPart
from omnirelay.errors import InvalidRequestError, MediaError
from omnirelay.protocol import DEFAULT_SAMPLING, GenerateRequest, SamplingOverrides
from omnirelay.tools import Choice, ChosenFunction, ChosenTool, Tool
from omnirelay.values import TRANSCRIPTION_PROMPT

Prompt = str | Sequence[ChatMessage | Mapping[str, Any]] | GenerateRequest
"""Text of the user, a conversation, or a whole request (then without options)."""


class Conversation(Protocol):
    """What has messages: an answer of ``omnirelay.server.Omni.generate``."""

    @property
    def messages(self) -> Sequence[ChatMessage | Mapping[str, Any]]:
        """The messages, in their order."""


History = Sequence[ChatMessage | Mapping[str, Any]] | Conversation
_ALIASES: Final = {
    "system_prompt": "system",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}
P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")


def build_request(  # noqa: PLR0913 - the one place that lists the options of a request
    prompt: Prompt = "",
    *,
    system: str | None = None,
    history: History = (),
    audio: AudioSource | Sequence[AudioSource] = (),
    images: ImageSource | Sequence[ImageSource] = (),
    videos: VideoSource | Sequence[VideoSource] = (),
    use_audio_in_video: bool = False,
    speech: bool = True,
    voice: str | None = None,
    speaker: str | None = None,
    streaming: bool = True,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any] | Tool] = (),
    tool_choice: str | None = None,
    text_sampling: SamplingOverrides = DEFAULT_SAMPLING,
    codec_sampling: SamplingOverrides = DEFAULT_SAMPLING,
    chunk_frames: Sequence[int] = (),
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    priority: int = 0,
    deadline_s: float | None = None,
    traceparent: str | None = None,
    say: str | None = None,
) -> GenerateRequest:
    """Build a request; reads the files that it names.

    Args:
        prompt: Text of the user; a conversation of ``ChatMessage`` or of dicts as in OpenAI's API, with parts
            of type ``text``, ``image_url`` and ``input_audio``; or a whole ``GenerateRequest``.
        system: Text of a system message before the prompt.
        history: Messages between the system message and the prompt; or an answer of ``Omni.generate``, whose
            conversation goes on.
        audio: Sounds, one source or several: paths, URLs, bytes of files, or ``omnirelay.audio(samples)``.
            Media precede the text, in the same message.
        images: Images likewise.
        videos: Videos likewise.
        use_audio_in_video: Use the videos' sound too.
        speech: Answer with speech too.
        voice: Name of the voice; None is the checkpoint's default.
        speaker: The same.
        streaming: Send audio while it is generated, not in one piece at the end.
        max_tokens: Most tokens of the text.
        temperature: Of the text; the default is greedy.
        top_p: Of the text.
        json_schema: A JSON schema that the text obeys.
        tools: Functions that the model may call, as in OpenAI's API; without speech only.
        tool_choice: ``auto`` (the default), ``required``, ``none``, or the name of the function to call.
        text_sampling: Further parameters of the text, ``SamplingOverrides(top_k=20)``.
        codec_sampling: How speech is sampled; the default is that of the released model.
        chunk_frames: Sizes of the pieces of streamed speech in codec frames (whole blocks), for samples that
            are repeatable too; the last one repeats.  Otherwise each piece is cut when it is needed.
        stop: Texts before which the reply ends, at most four; without speech only.
        seed: Makes the answer repeatable.
        priority: Smaller is served first.
        deadline_s: The request fails if it has not ended by then.
        traceparent: The caller's span, as in W3C's header of that name.
        say: Text that is spoken as it is, instead of an answer; the prompt may then be left out.

    Raises:
        MediaError: A media item cannot be read.
        InvalidRequestError: A dict is not a message, or not a tool; or ``history`` has no messages.
        TypeError: A whole request was given together with options, or a conversation together with media; or
            an option was given twice.
    """
    if None not in (voice, speaker):
        raise TypeError("voice and speaker are the same option: give one of them")
    if json_schema is not None and not isinstance(json_schema, str):
        json_schema = msgspec.json.encode(json_schema).decode()
    own = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "json_schema": json_schema}
    options = GenerateRequest(
        use_audio_in_video=use_audio_in_video,
        speech=speech,
        speaker=speaker if voice is None else voice,
        streaming=streaming,
        tools=[_convert(tool, Tool, f"tools[{at}]") for at, tool in enumerate(tools)],
        tool_choice=_choice(tool_choice),
        text_sampling=_with(text_sampling, own),
        codec_sampling=codec_sampling,
        chunk_frames=list(chunk_frames),
        stop=[stop] if isinstance(stop, str) else list(stop),
        seed=seed,
        priority=priority,
        deadline_s=deadline_s,
        traceparent=traceparent,
        say=say,
    )
    earlier = history if isinstance(history, Sequence) else getattr(history, "messages", None)
    if earlier is None:
        problem = f"history: a {type(history).__name__} does not know its prompt; pass a list of messages"
        raise InvalidRequestError(f"{problem}, or an answer of Omni.generate", "history")
    media = any(not isinstance(each, list | tuple) or each for each in (audio, images, videos))
    if isinstance(prompt, GenerateRequest):
        if options != GenerateRequest() or media or earlier or system is not None:
            raise TypeError("options belong into the GenerateRequest itself")
        return prompt
    if prompt == "" and say is not None and not media:
        messages = []
    elif isinstance(prompt, str):
        messages = [ChatMessage("user", content(prompt, audio, images, videos))]
    elif media:
        raise TypeError("media of a conversation belong into its messages")
    else:
        messages = _messages(prompt, "messages")
    messages = _messages(earlier, "history") + messages
    if system is not None:
        messages.insert(0, ChatMessage("system", system))
    return msgspec.structs.replace(options, messages=messages)


def transcription(file: AudioSource, prompt: str | None = None, **options: Any) -> GenerateRequest:
    """Build the request that ``/v1/audio/transcriptions`` makes; options as of :func:`build_request`."""
    return build_request(TRANSCRIPTION_PROMPT, system=prompt, audio=file, speech=False, **options)


def _choice(name: str | None) -> Choice | None:
    if name is None or name in ("none", "auto", "required"):
        return name  # type: ignore[return-value]  # the words of Choice
    return ChosenTool("function", ChosenFunction(name))


def _with(sampling: SamplingOverrides, own: Mapping[str, Any]) -> SamplingOverrides:
    """Add options that were given directly."""
    given = {name: value for name, value in own.items() if value is not None}
    if twice := [name for name in given if getattr(sampling, name) is not None]:
        raise TypeError(f"{', '.join(twice)} given twice: as an option, and in text_sampling")
    return msgspec.structs.replace(sampling, **given) if given else sampling


def taking_options_of(
    build: Callable[P, GenerateRequest],
) -> Callable[[Callable[[S, GenerateRequest], R]], Callable[Concatenate[S, P], R]]:
    """Replace the request that a method takes by the parameters of ``build``, also in ``help()``."""

    def decorate(method: Callable[[S, GenerateRequest], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def chat(self: S, /, *args: P.args, **options: P.kwargs) -> R:
            for name in options.keys() - parameters.keys():
                _refuse(name, list(parameters))
            return method(self, build(*args, **options))

        parameters = inspect.signature(build).parameters
        own = inspect.signature(method)
        first = next(iter(own.parameters.values()))
        chat.__signature__ = own.replace(parameters=[first, *parameters.values()])  # type: ignore[attr-defined]
        details = (inspect.getdoc(build) or "").partition("\n\n")[2]
        chat.__doc__ = f"{inspect.getdoc(method)}\n\n{details}"
        return chat

    return decorate


def _refuse(name: str, known: list[str]) -> NoReturn:
    wanted = _ALIASES.get(name, name)
    if wanted in SamplingOverrides.__struct_fields__:
        direct = f"{wanted}=..." if wanted in known else f"text_sampling=SamplingOverrides({wanted}=...)"
        hint = f"did you mean {direct}, or codec_sampling=SamplingOverrides({wanted}=...) for the speech?"
    elif nearest := get_close_matches(wanted, known, 1):
        hint = f"did you mean {nearest[0]}?"
    else:
        hint = f"the options are {', '.join(known[1:])}"
    raise TypeError(f"chat() has no option {name!r}; {hint}")


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class _InlineAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: str
    format: str = ""
    """Ignored: the file says it."""


class _InputAudio(_Struct, frozen=True, tag="input_audio"):
    input_audio: _InlineAudio


class _Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    detail: Literal["auto", "high"] = "auto"
    """The model always sees the whole image."""


class _ImageUrl(_Struct, frozen=True, tag="image_url"):
    image_url: _Address


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Role
    content: str | list[Any]


def _messages(messages: Sequence[object], where: str) -> list[ChatMessage]:
    if not isinstance(messages, Iterable):
        raise TypeError(f"{where} is a {type(messages).__name__}, not a list; nor is it a text")
    return [_message(message, f"{where}[{at}]") for at, message in enumerate(messages)]


def _message(message: object, where: str) -> ChatMessage:
    """Convert a message of OpenAI's API."""
    if isinstance(message, ChatMessage):
        return message
    read = _convert(message, _Message, where)
    if isinstance(read.content, str):
        return ChatMessage(read.role, read.content)
    parts = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(read.content)]
    return ChatMessage(read.role, parts)


def _part(part: object, where: str) -> ContentPart:
    if isinstance(part, TextPart | AudioPart | ImagePart | VideoPart):
        return part
    read = _convert(part, TextPart | _ImageUrl | _InputAudio, where)
    if isinstance(read, _ImageUrl):
        return ImagePart(url=read.image_url.url)
    if isinstance(read, _InputAudio):
        try:
            return AudioPart(data=memoryview(base64.b64decode(read.input_audio.data, validate=True)))
        except (binascii.Error, ValueError) as error:
            raise MediaError(f"{where}.input_audio.data is not base64: {error}") from error
    return read


def _convert(value: object, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{where}: {error}", where) from error
