"""The settings of a session, with the fields of OpenAI's API and of its beta."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from gateway.http.context import HttpContext
from gateway.http.encoding.tempo import require_speed
from gateway.http.fields import convert_given, given, named, read_fields, require_neutral
from gateway.http.openai.chat_request import Voice, voice_name
from gateway.http.realtime.functions import read_choice, read_tools, shown_choice, shown_tools
from gateway.http.realtime.input.transcription import TranscriptionRules
from gateway.http.realtime.speech import BetaName, Format, FormatFields, read_format, shown_format
from gateway.http.realtime.turns.rules import ServerVad, TurnRules
from gateway.input.tools import CallParser, explained, forced_schema
from omnirelay.content import ChatMessage
from omnirelay.errors import InvalidRequestError, UnsupportedError
from omnirelay.protocol import GenerateRequest
from omnirelay.tools import Choice, Tool
from shared.messages import Temperature

MAX_INSTRUCTIONS: Final = 2**20
"""Characters."""
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "include": ([],),
    "input_audio_noise_reduction": (),
    "prompt": (),
    "truncation": ("auto",),
}
"""Fields that are accepted with these values or null only."""
WITHOUT_TURNS: Final = ("gpt-realtime-whisper", "gpt-live-transcribe")
"""Names of OpenAI's models for transcripts that detect no turns by themselves: who names them commits."""
Speed = Annotated[float, Meta(ge=0.25, le=1.5)]
Kind = Literal["realtime", "transcription"]


class _Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: FormatFields | None = None
    turn_detection: Any = msgspec.UNSET
    transcription: Any = msgspec.UNSET
    noise_reduction: Any = None


class _OutputFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: FormatFields | None = None
    voice: Voice | None = None
    speed: Speed | None = None


class _Audio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input: _Input = _Input()
    output: _OutputFields = _OutputFields()


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are honoured; the last nine are the beta's."""

    type: Kind | None = None
    model: str | None = None
    output_modalities: list[str] | None = None
    instructions: str | None = None
    audio: _Audio = _Audio()
    max_output_tokens: int | Literal["inf"] | None = None
    temperature: Temperature | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    voice: Voice | None = None
    speed: Speed | None = None
    input_audio_format: BetaName | None = None
    output_audio_format: BetaName | None = None
    turn_detection: Any = msgspec.UNSET
    input_audio_transcription: Any = msgspec.UNSET
    max_response_output_tokens: int | Literal["inf"] | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of responses; none stands for the default.

    Attributes:
        kind: Of the session; one of transcription never answers.
        speech: Answer with speech.
        instructions: The system message.
        voice: The speaker.
        speed: Of the speech; 2 is twice as fast.
        input_format: Of the audio that the client sends.
        output_format: Of the speech.
        max_output_tokens: Limit of text tokens.
        temperature: Of text tokens.
        tools: The functions that may be called.
        tool_choice: Which of them must be.
        parallel: Several may be called at once.
        turns: How turns are detected; none if the client says when they end.
        transcription: How the input is transcribed; none if it is not.
    """

    kind: Kind = "realtime"
    speech: bool = True
    instructions: str = ""
    voice: str | None = None
    speed: float = 1.0
    input_format: Format = "audio/pcm"
    output_format: Format = "audio/pcm"
    max_output_tokens: int | None = None
    temperature: float | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: Choice = "auto"
    parallel: bool = True
    turns: TurnRules | None = ServerVad()
    transcription: TranscriptionRules | None = None

    @property
    def transcripts(self) -> TranscriptionRules | None:
        """How the input is transcribed, which a session of transcription does always; none if it is not."""
        return (
            TranscriptionRules()
            if self.transcription is None and self.kind == "transcription"
            else self.transcription
        )

    @property
    def modalities(self) -> list[str]:
        """``speech`` in OpenAI's form."""
        return ["audio"] if self.speech else ["text"]

    @property
    def shown_output(self) -> dict[str, Any]:
        """How answers are spoken, in OpenAI's form."""
        fields = {"format": shown_format(self.output_format), "voice": self.voice, "speed": self.speed}
        return given(fields)

    @property
    def most(self) -> int | str:
        """``max_output_tokens`` in OpenAI's form."""
        return "inf" if self.max_output_tokens is None else self.max_output_tokens

    @property
    def active_tools(self) -> Sequence[Tool]:
        """The functions that the model is told of."""
        return () if self.tool_choice == "none" else self.tools

    async def forced_call(self, context: HttpContext, client: str) -> str | None:
        """Return the schema of an answer that must be a call; none if it need not.

        Raises:
            InvalidRequestError: No function can be called.
        """
        if self.tool_choice in ("auto", "none"):
            return None
        return await context.parsing.run(client, forced_schema, self.active_tools, self.tool_choice)

    def call_parser(self) -> CallParser:
        """A parser of an answer."""
        names = frozenset(tool.function.name for tool in self.active_tools)
        return CallParser(names, self.tool_choice not in ("auto", "none"), self.parallel)

    def instructed(self, messages: list[ChatMessage], spoken: str | None) -> list[ChatMessage]:
        """Return messages after the system message, if there is one.

        Args:
            spoken: The default instructions of spoken answers, which the gateway adds where there is no
                system message.
        """
        instructions = self.instructions
        if self.active_tools and self.speech:
            instructions = instructions or spoken or ""
        if instructions:
            messages = [ChatMessage("system", instructions), *messages]
        return explained(messages, self.active_tools) if self.active_tools else messages

    def changed(
        self,
        values: Mapping[str, Any],
        where: str,
        require_model: Callable[[str], None],
        unavailable: Callable[[UnsupportedError], None],
    ) -> "Settings":
        """Return the settings with an event's changes, found at ``where`` in it.

        Args:
            unavailable: Called with what this gateway does not do; the other changes are made if it returns.

        Raises:
            UnsupportedError: A change is not supported, or from ``unavailable``.
            InvalidRequestError: A change is invalid.
            UnknownModelError: From ``require_model``.
        """
        fields = read_fields(_available(values, unavailable), _Fields, NEUTRAL)
        if fields.model is not None:
            require_model(fields.model)
        if fields.audio.input.noise_reduction:
            problem = "noise reduction of the input is not supported: set it to null"
            unavailable(UnsupportedError(problem, f"{where}.audio.input.noise_reduction"))
        if len(fields.instructions or "") > MAX_INSTRUCTIONS:
            problem = f"{where}.instructions is limited to {MAX_INSTRUCTIONS} characters"
            raise InvalidRequestError(problem, f"{where}.instructions")
        changes = given(
            {
                "kind": fields.type,
                "instructions": fields.instructions,
                "voice": voice_name(fields.audio.output.voice or fields.voice),
                "temperature": fields.temperature,
                "parallel": fields.parallel_tool_calls,
            }
        )
        if (asked := _first(fields.output_modalities, fields.modalities)) is not None:
            changes["speech"] = _speech(asked, f"{where}.output_modalities")
        if (most := _first(fields.max_output_tokens, fields.max_response_output_tokens)) is not None:
            changes["max_output_tokens"] = _tokens(most, f"{where}.max_output_tokens")
        changes |= _audio_changes(fields, where, unavailable)
        if fields.tools is not None:
            changes["tools"] = read_tools(fields.tools, f"{where}.tools", unavailable)
        if fields.tool_choice is not None:
            changes["tool_choice"] = read_choice(fields.tool_choice, f"{where}.tool_choice")
        changes |= _listening_changes(fields, values, where)
        return replace(self, **changes)

    def shown(self, session_id: str, model: str) -> dict[str, Any]:
        """Return the session in OpenAI's form, without what was not set: clients' readers refuse nulls."""
        turns = None if self.turns is None else given(msgspec.to_builtins(self.turns))
        listening = {
            "format": shown_format(self.input_format),
            "turn_detection": turns,
            "transcription": msgspec.to_builtins(self.transcription),
        }
        if self.kind == "transcription":
            head = {"type": self.kind, "object": "realtime.transcription_session", "id": session_id}
            return {**head, "audio": {"input": listening}}
        fields = {
            "type": self.kind,
            "object": "realtime.session",
            "id": session_id,
            "model": model,
            "output_modalities": self.modalities,
            "instructions": self.instructions,
            "audio": {"input": listening, "output": self.shown_output},
            "max_output_tokens": self.most,
            "temperature": self.temperature,
            "tools": shown_tools(self.tools),
            "tool_choice": shown_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel,
            "truncation": "auto",
        }
        return given(fields)


async def changed_settings(
    context: HttpContext,
    client: str,
    settings: Settings,
    values: dict[str, Any],
    where: str,
    unavailable: Callable[[UnsupportedError], None],
) -> Settings:
    """Return settings with changes, as :meth:`Settings.changed` does, and with a voice that is there."""
    if not values:
        return settings
    # Schemas of functions take long to check.
    given = values, where, context.require_model, unavailable
    changed = await context.parsing.run(client, settings.changed, *given)
    if changed.voice != settings.voice:
        with named({"speaker": f"{where}.audio.output.voice"}):
            context.gateway.validator.speaker(GenerateRequest(speech=True, speaker=changed.voice))
    return changed


def split(values: Mapping[str, Any], names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split fields into those with these names and the others."""
    return (
        {name: value for name, value in values.items() if name in names},
        {name: value for name, value in values.items() if name not in names},
    )


def shown_warnings(warnings: Iterable[UnsupportedError]) -> list[dict[str, Any]]:
    """Return what of a session's settings is not available, in the form that clients see."""
    return [{"param": each.param, "message": str(each)} for each in warnings]


def refuse(error: UnsupportedError) -> None:
    """Refuse a change with all others.

    Raises:
        UnsupportedError: Always.
    """
    raise error


def _available(values: Mapping[str, Any], unavailable: Callable[[UnsupportedError], None]) -> dict[str, Any]:
    """Return the fields without those that this gateway does not honour."""
    kept = {}
    for name, value in values.items():
        try:
            if name in NEUTRAL:
                require_neutral(name, value, NEUTRAL)
            kept[name] = value
        except UnsupportedError as error:
            unavailable(error)
    return kept


def _audio_changes(
    fields: _Fields, where: str, unavailable: Callable[[UnsupportedError], None]
) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    place = f"{where}.audio.input.format"
    if (name := read_format(fields.audio.input.format, fields.input_audio_format, place)) is not None:
        if where != "session":
            raise UnsupportedError(
                "the input's format belongs to the session: set it by session.update", place
            )
        changes["input_format"] = name
    place = f"{where}.audio.output.format"
    if (name := read_format(fields.audio.output.format, fields.output_audio_format, place)) is not None:
        changes["output_format"] = name
    if (speed := _first(fields.audio.output.speed, fields.speed)) is not None:
        try:
            require_speed(speed, f"{where}.audio.output.speed")
            changes["speed"] = speed
        except UnsupportedError as error:
            unavailable(error)
    return changes


def _listening_changes(fields: _Fields, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    # Null is a value here: no detection of turns, no transcripts.
    unset = msgspec.UNSET
    turns = fields.audio.input.turn_detection
    turns = values.get("turn_detection", unset) if turns is unset else turns
    if turns is not unset:
        changes["turns"] = _of_session(turns, TurnRules, where, "turn_detection")
    transcription = fields.audio.input.transcription
    if transcription is unset:
        transcription = values.get("input_audio_transcription", unset)
    if transcription is not unset:
        rules = _of_session(transcription, TranscriptionRules, where, "transcription")
        changes["transcription"] = rules
        commits = rules is not None and (rules.model or "").startswith(WITHOUT_TURNS)
        if commits and fields.type == "transcription" and turns is unset:
            changes["turns"] = None
    return changes


def _of_session(values: Any, kind: Any, where: str, name: str) -> Any:
    """Convert what belongs to the input of a session; null stays none.

    Raises:
        UnsupportedError: It is set for a response.
        InvalidRequestError: It is invalid.
    """
    if values is None:
        return None
    place = f"{where}.audio.input.{name}"
    if where != "session":
        raise UnsupportedError(f"{name} belongs to the session: set it by session.update", place)
    return convert_given(values, kind, place)


def _first(current: Any, beta: Any) -> Any:
    return beta if current is None else current


def _speech(asked: list[str], where: str) -> bool:
    if not asked or not set(asked) <= {"text", "audio"}:
        raise UnsupportedError(f'{where} can be ["audio"] or ["text"]', where)
    return "audio" in asked


def _tokens(most: int | str, where: str) -> int | None:
    if isinstance(most, str):
        return None
    if most < 1:
        raise InvalidRequestError(f"{where} must be positive, not {most}", where)
    return most
