"""The body of ``/v1/chat/completions``, converted to a request of the gateway."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.http.answer import AnswerOptions
from gateway.http.encoding.encoders import FORMATS, AudioFormat, require_format
from gateway.http.fields import convert, read_fields, require_one_of
from gateway.http.openai.messages import Kept, Message, joined_results, read_message
from gateway.http.openai.strings import MIN_LENGTH, Body
from gateway.input.tools import CallParser, with_tools
from omnirelay.content import MAX_MESSAGES, ChatMessage
from omnirelay.errors import InvalidRequestError, UnsupportedError
from omnirelay.protocol import MAX_STOPS, GenerateRequest, PartialAnswer, SamplingOverrides, StopText
from omnirelay.tools import Choice, Tools
from omnirelay.values import MAX_BIASES, ChunkFrames, LogitBias, Logprobs, MinP, Penalty, TokenIdText
from shared.messages import MAX_TOP_K, Priority, RepetitionPenalty, Temperature, TopP

DEFAULT_FORMAT: Final[AudioFormat] = "wav"
MAX_CHOICES: Final = 8
"""Answers to one request; each counts as a request."""


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


class SchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema of the answer; ``strict`` is ignored, because it is always obeyed."""

    name: str = ""
    schema: dict[str, Any] = {}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's form of structured outputs."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class ProcessorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's options for media."""

    use_audio_in_video: bool = False


class ChatFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are honoured.

    Attributes:
        model: The served model's name, or ``omnirelay``.
        messages: The conversation, at most 2048 messages (docs/api-chat.md#messages).
        modalities: ``["text"]``, the default, or ``["text", "audio"]``. ``["audio"]`` is refused.
        audio: ``voice`` and ``format`` of the speech; needs ``modalities`` with ``audio``. A voice is the
            checkpoint's, or an alias such as OpenAI's ``alloy``. Formats: docs/api-speech.md#formats.
        stream: Stream the answer as server-sent events (docs/api-chat.md#streams).
        stream_options: ``{"include_usage": true}``: token counts at the end; with
            ``"continuous_usage_stats": true`` in each chunk too.
        max_tokens: As ``max_completion_tokens``.
        max_completion_tokens: Most *text* tokens; codec ids are not counted. Default and most:
            ``gateway.limits.max_text_tokens``.
        min_tokens: No end token before this many tokens.
        ignore_eos: No end token at all: the answer has the maximum length.
        temperature: 0 is greedy, and the default.
        top_p: Default: 1.
        top_k: 0 and -1, the default, switch it off.
        repetition_penalty: Default: 1.
        presence_penalty: On each token that the answer has, once.
        frequency_penalty: On each token of the answer, for every occurrence.
        min_p: Excludes tokens with less than this share of the likeliest token's probability.
        logit_bias: Added to the logits, by token ids as strings.
        logprobs: Log probabilities of the text tokens, before penalties, biases and temperature.
        top_logprobs: And those of so many of the likeliest tokens at each.
        response_format: ``json_object`` or ``json_schema`` (docs/api-chat.md#json).
        tools: Functions (docs/api-chat.md#functions) that the model may call.
        tool_choice: Whether a call must be made, and of which function.
        parallel_tool_calls: Whether an answer may have several calls.
        stop: Up to 4 texts of at most 256 characters; the answer ends before the first. Text only.
        n: Number of answers (docs/api-chat.md#several-answers).
        seed: Makes text, speech and noise repeatable; samples to the last bit only with ``chunk_frames``.
            Default, and -1 as with vLLM: random.
        priority: Smaller is served first.
        deadline_s: Deadline of the request. Default and most: ``gateway.limits.deadline_s``.
        mm_processor_kwargs: ``{"use_audio_in_video": true}``: use the audio of videos too. No other key.
        codec_sampling: Sampling of speech: ``max_tokens``, ``min_tokens``, ``temperature``, ``top_k``,
            ``top_p``, ``repetition_penalty``.
        chunk_frames: Sizes of the pieces in which speech is made (docs/protocol.md#sizes-of-pieces).
        resumable: Send what it takes to continue a streamed answer
            (docs/api-chat.md#continuing-after-a-loss).
        resume: A partial answer to continue.
    """

    model: str
    messages: Annotated[list[Any], Meta(min_length=1, max_length=MAX_MESSAGES)]
    modalities: list[str] | None = None
    audio: AudioOptions | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool = False
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOP_K)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    min_p: MinP | None = None
    logit_bias: Annotated[dict[TokenIdText, LogitBias], Meta(max_length=MAX_BIASES)] | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Tools = []
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    stop: Annotated[str, Meta(max_length=256)] | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] = []
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Priority = 0
    deadline_s: float | None = None
    mm_processor_kwargs: ProcessorOptions = ProcessorOptions()
    codec_sampling: SamplingOverrides = SamplingOverrides()
    chunk_frames: ChunkFrames = []
    resumable: bool = False
    resume: PartialAnswer | None = None


@dataclass(frozen=True)
class ChatAnswerOptions(AnswerOptions):
    """How a client wants its completion.

    Attributes:
        usage: When the numbers of tokens are told.
        logprobs: The answer has the log probabilities of its tokens.
        audio: The format of the speech; none for text only.
        calls: A parser that has read nothing.
        resumable: Each chunk has what it takes to go on behind it.
    """

    usage: StreamOptions
    logprobs: bool
    audio: AudioFormat | None
    calls: CallParser = field(default_factory=CallParser)
    resumable: bool = False

    def call_parser(self) -> CallParser:
        """A parser of an answer."""
        return replace(self.calls)


def read_chat(
    body: Body,
    max_text_tokens: int,
    kept: Kept = lambda _: None,
    continued: Callable[[list[ChatMessage]], list[ChatMessage]] = lambda messages: messages,
    places: Sequence[str] = (),
) -> tuple[ChatAnswerOptions, GenerateRequest]:
    """Check a chat; ``ignore_eos`` asks for ``max_text_tokens``.

    Args:
        kept: Gives the texts of earlier answers.
        continued: Puts an earlier conversation before the messages.
        places: Where each message is in the request, if it is not in ``messages``.

    Raises:
        InvalidRequestError: It is invalid, or asks for something that is not supported.
    """
    strings, fields = body.strings, read_fields(body.values, ChatFields)
    audio = _audio_format(fields)
    places = places or [f"messages[{at}]" for at in range(len(fields.messages))]
    try:
        given = [convert(each, Message, place) for each, place in zip(fields.messages, places, strict=True)]
        read = [read_message(each, strings, place, kept) for each, place in zip(given, places, strict=True)]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: {error}", "messages") from error
    messages = continued(joined_results(given, read))
    tools = fields.tools if fields.tool_choice != "none" else []
    _check_choices(fields, audio)
    _check_resumable(fields, audio, bool(tools))
    stop = [fields.stop] if isinstance(fields.stop, str) and fields.stop else list(fields.stop)
    text_sampling = _text_sampling(fields, max_text_tokens)
    described = msgspec.json.encode(tools).decode()
    for name, texts in (
        ("tools", [described]),
        ("stop", stop),
        ("response_format", [text_sampling.json_schema or ""]),
    ):
        if any(map(strings.has_word, texts)):
            raise InvalidRequestError(f"{name} has a string of more than {MIN_LENGTH} bytes", name)
    voice = fields.audio.voice if fields.audio else None
    given_request = GenerateRequest(
        messages=messages,
        tools=tools,
        tool_choice=fields.tool_choice,
        speech=audio is not None,
        speaker=voice_name(voice),
        text_sampling=text_sampling,
        codec_sampling=fields.codec_sampling,
        chunk_frames=fields.chunk_frames,
        stop=stop,
        seed=None if fields.seed in (None, -1) else fields.seed % 2**63,
        priority=fields.priority,
        deadline_s=fields.deadline_s,
        use_audio_in_video=fields.mm_processor_kwargs.use_audio_in_video,
        resumable=fields.resumable,
        resume=fields.resume,
    )
    request, parser = with_tools(given_request)
    options = ChatAnswerOptions(
        fields.model,
        fields.stream,
        fields.stream_options,
        fields.logprobs,
        audio,
        replace(parser, several=fields.parallel_tool_calls),
        fields.resumable,
        choices=fields.n,
    )
    return options, request


def _check_choices(fields: ChatFields, audio: AudioFormat | None) -> None:
    """Check that there can be several answers, if more than one is asked for."""
    if fields.n == 1:
        return
    if audio is not None:
        raise UnsupportedError("n over 1 is for answers in text only", "n")
    if fields.resumable:
        raise UnsupportedError("only one answer is resumable", "n")
    if fields.stream_options.continuous_usage_stats:
        raise UnsupportedError(
            "continuous_usage_stats count one answer only", "stream_options.continuous_usage_stats"
        )


def _check_resumable(fields: ChatFields, audio: AudioFormat | None, tools: bool) -> None:
    """Check that an answer can go on behind any of its chunks."""
    if fields.resume is not None and not fields.resumable:
        raise InvalidRequestError("resume needs resumable: true", "resume")
    if fields.resumable and not fields.stream:
        raise InvalidRequestError("resumable needs stream: true", "resumable")
    if fields.resumable and (audio not in (None, "pcm16") or tools):
        raise UnsupportedError(
            "only answers in text, or with audio.format pcm16, and without tools are resumable", "resumable"
        )


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


def _json_schema(form: ResponseFormat | None) -> str | None:
    """Return the schema that an answer must obey."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return '{"type":"object"}'
    if form.json_schema is None:
        raise InvalidRequestError(
            "response_format.json_schema is missing: give the schema", "response_format.json_schema"
        )
    return msgspec.json.encode(form.json_schema.schema).decode()


def _text_sampling(fields: ChatFields, max_text_tokens: int) -> SamplingOverrides:
    most = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    if fields.max_tokens not in (None, most):
        raise InvalidRequestError(
            f"max_tokens is {fields.max_tokens} and max_completion_tokens {most}: give one of them",
            "max_tokens",
        )
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequestError("top_logprobs need logprobs: true", "top_logprobs")
    biases = fields.logit_bias
    return SamplingOverrides(
        max_tokens=most,
        # The most possible, so that no end token is drawn.
        min_tokens=(most or max_text_tokens) if fields.ignore_eos else fields.min_tokens,
        temperature=fields.temperature,
        top_k=0 if fields.top_k == -1 else fields.top_k,
        top_p=fields.top_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        min_p=fields.min_p,
        logit_bias={int(token): bias for token, bias in biases.items()} if biases else None,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        json_schema=_json_schema(fields.response_format),
    )
