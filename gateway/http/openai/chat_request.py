"""The body of ``/v1/chat/completions``, converted to a request of the gateway."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.http.answer import AnswerOptions
from gateway.http.body import read_object
from gateway.http.encoding.encoders import FORMATS, AudioFormat, require_format
from gateway.http.fields import convert, read_fields, require_one_of
from gateway.http.openai.messages import Message, read_message
from gateway.http.openai.strings import LongStrings
from omnirelay.content import MAX_MESSAGES
from omnirelay.errors import InvalidRequestError, UnsupportedError
from omnirelay.protocol import GenerateRequest, SamplingOverrides
from shared.messages import MAX_TOP_K, Priority, RepetitionPenalty, Seed, Temperature, TopP

DEFAULT_FORMAT: Final[AudioFormat] = "wav"


class VoiceId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's form for custom voices."""

    id: str


Voice = str | VoiceId


class AudioOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of speech."""

    voice: Voice | None = None
    format: str = DEFAULT_FORMAT


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class ProcessorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's options for media."""

    use_audio_in_video: bool = False


class ChatFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are honoured."""

    model: str
    messages: Annotated[list[Any], Meta(min_length=1, max_length=MAX_MESSAGES)]
    modalities: list[str] | None = None
    audio: AudioOptions | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool = False
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOP_K)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    priority: Priority = 0
    deadline_s: float | None = None
    mm_processor_kwargs: ProcessorOptions = ProcessorOptions()
    codec_sampling: SamplingOverrides = SamplingOverrides()


@dataclass(frozen=True)
class ChatAnswerOptions(AnswerOptions):
    """How a client wants its completion.

    Attributes:
        include_usage: End the stream with the numbers of tokens.
        audio: The format of the speech; none for text only.
    """

    include_usage: bool
    audio: AudioFormat | None


def read_chat(
    body: bytearray, max_text_tokens: int, max_item_bytes: int
) -> tuple[ChatAnswerOptions, GenerateRequest]:
    """Parse and check a body; ``ignore_eos`` asks for ``max_text_tokens``.

    Raises:
        InvalidRequestError: It is invalid, or asks for something that is not supported.
    """
    strings = LongStrings(max_item_bytes)
    fields = read_fields(read_object(strings.cut(body)), ChatFields)
    audio = _audio_format(fields)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError("stream_options need stream: true", "stream_options")
    usage = fields.stream_options or StreamOptions()
    if usage.continuous_usage_stats:
        raise UnsupportedError(
            "usage is sent once, at the end of a stream", "stream_options.continuous_usage_stats"
        )
    places = [f"messages[{at}]" for at in range(len(fields.messages))]
    try:
        messages = [
            read_message(convert(each, Message, place), strings, place)
            for each, place in zip(fields.messages, places, strict=True)
        ]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: {error}", "messages") from error
    voice = fields.audio.voice if fields.audio else None
    request = GenerateRequest(
        messages=messages,
        speech=audio is not None,
        speaker=voice_name(voice),
        text_sampling=_text_sampling(fields, max_text_tokens),
        codec_sampling=fields.codec_sampling,
        seed=fields.seed,
        priority=fields.priority,
        deadline_s=fields.deadline_s,
        use_audio_in_video=fields.mm_processor_kwargs.use_audio_in_video,
    )
    return ChatAnswerOptions(fields.model, fields.stream, usage.include_usage, audio), request


def voice_name(voice: Voice | None) -> str | None:
    """Return the name of a voice in either form."""
    return voice.id if isinstance(voice, VoiceId) else voice


def _audio_format(fields: ChatFields) -> AudioFormat | None:
    """Return the format of the speech; none for text only."""
    asked = {"text"} if fields.modalities is None else set(fields.modalities)
    if asked == {"text"}:
        if fields.audio is not None:
            raise InvalidRequestError('audio needs modalities: ["text", "audio"]', "audio")
        return None
    if asked != {"text", "audio"}:
        raise UnsupportedError('modalities can be ["text"] or ["text", "audio"]', "modalities")
    name = fields.audio.format if fields.audio else DEFAULT_FORMAT
    require_one_of("audio.format", name, FORMATS)
    found = next(each for each in FORMATS if each == name)
    require_format(found, "audio.format")
    return found


def _text_sampling(fields: ChatFields, max_text_tokens: int) -> SamplingOverrides:
    most = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    if fields.max_tokens not in (None, most):
        raise InvalidRequestError(
            f"max_tokens is {fields.max_tokens} and max_completion_tokens {most}: give one of them",
            "max_tokens",
        )
    return SamplingOverrides(
        max_tokens=most,
        # The most possible, so that no end token is drawn.
        min_tokens=(most or max_text_tokens) if fields.ignore_eos else fields.min_tokens,
        temperature=fields.temperature,
        top_k=0 if fields.top_k == -1 else fields.top_k,
        top_p=fields.top_p,
        repetition_penalty=fields.repetition_penalty,
    )
