"""The settings of a session, with the fields of OpenAI's API and of its beta."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from gateway.http.context import HttpContext
from gateway.http.encoding.tempo import require_speed
from gateway.http.fields import IGNORED, convert, convert_given, given, named, require_neutral, whole
from gateway.http.openai.chat_request import Voice, voice_name
from gateway.http.realtime.audio import BetaName, Format, FormatFields, read_format, shown_format
from gateway.http.realtime.transcription import TranscriptionRules
from gateway.http.realtime.turn_detection import ServerVad, TurnRules
from gateway.input.json_schema import require_feasible
from gateway.input.tools import CallParser, explained, forced_schema
from omnirelay.content import ChatMessage
from omnirelay.errors import InvalidRequestError, UnsupportedError
from omnirelay.protocol import GenerateRequest
from omnirelay.tools import MAX_TOOLS, Choice, ChosenFunction, ChosenTool, Function, Tool
from shared.messages import Temperature

Instructions = Annotated[str, Meta(max_length=2**20)]
MostTokens = Annotated[int, Meta(ge=1)] | Literal["inf"]
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
MAX_TOOLS_BYTES: Final = 2**18
"""Size of all functions together as JSON."""
WORDS: Final = ("none", "auto", "required")
Unavailable = Callable[[UnsupportedError], None]
"""Called with what this gateway does not do; the other changes are made if it returns."""


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
        always = TranscriptionRules() if self.kind == "transcription" else None
        return self.transcription or always

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
        unavailable: Unavailable,
    ) -> "Settings":
        """Return the settings with an event's changes, found at ``where`` in it.

        Raises:
            UnsupportedError: A change is not supported, or from ``unavailable``.
            InvalidRequestError: A change is invalid.
            UnknownModelError: From ``require_model``.
        """
        changes: dict[str, Any] = {}
        for path, value in _by_path(values, where).items():
            field, place = FIELDS.get(path), f"{where}.{path[:64]}"
            try:
                with named({path[:64]: place}):
                    if path == "model":
                        require_model(convert(value, str, place))
                    elif path == "tools":
                        changes["tools"] = read_tools(value, place, unavailable)
                    elif field is not None:
                        changes[field.name] = field.setting(value, place)
                    elif path not in IGNORED:
                        _require_without(path, value, place)
            except UnsupportedError as error:
                if field is not None and not field.optional:
                    raise
                unavailable(error)
        rules: TranscriptionRules | None = changes.get("transcription")
        commits = rules is not None and (rules.model or "").startswith(WITHOUT_TURNS)
        if commits and changes.get("kind") == "transcription" and "turns" not in changes:
            changes["turns"] = None
        return replace(self, **changes)

    def fields(self) -> dict[str, Any]:
        """Return :data:`FIELDS` in OpenAI's form, without what was not set: clients' readers refuse nulls."""
        shown: dict[str, Any] = {"audio": {"input": {}, "output": {}}}
        for path, field in FIELDS.items():
            value = field.show(getattr(self, field.name))
            *_, side, name = "", *path.split(".")
            if value is not None or path in NULLABLE:
                (shown["audio"][side] if side else shown)[name] = value
        return shown

    def shown(self, session_id: str, model: str) -> dict[str, Any]:
        """Return the session in OpenAI's form."""
        fields = self.fields()
        if self.kind == "transcription":
            head = {"type": self.kind, "object": "realtime.transcription_session", "id": session_id}
            return {**head, "audio": {"input": fields["audio"]["input"]}}
        head = {"object": "realtime.session", "id": session_id, "model": model, "truncation": "auto"}
        return {**head, **fields}


async def changed_settings(
    context: HttpContext,
    client: str,
    settings: Settings,
    values: dict[str, Any],
    where: str,
    unavailable: Unavailable,
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


def read_tools(values: Any, where: str, unavailable: Callable[[UnsupportedError], None]) -> tuple[Tool, ...]:
    """Read the tools of an event, found at ``where`` in it.

    Args:
        unavailable: Called with each tool that is not a function; the others are taken if it returns.

    Raises:
        InvalidRequestError: They are invalid, too many or too large.
        UnsupportedError: From ``unavailable``.
    """
    if not isinstance(values, list) or len(values) > MAX_TOOLS:
        raise InvalidRequestError(f"{where} must be a list of at most {MAX_TOOLS} functions", where)
    tools = []
    for at, each in enumerate(values):
        place = f"{where}[{at}]"
        # Without the object around it that chats have.
        given: dict[str, Any] = convert(each, dict[str, Any], place)
        if (kind := given.pop("type", None)) != "function":
            unavailable(
                UnsupportedError(f"{place}.type can be function, not {str(kind)[:64]!r}", f"{place}.type")
            )
            continue
        function = convert(given, Function, place)
        with named({"text_sampling.json_schema": f"{place}.parameters"}):
            require_feasible(msgspec.json.encode(function.parameters).decode(), obeyed=False)
        tools.append(Tool("function", function))
    if len(msgspec.json.encode(tools)) > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"{where} are limited to {MAX_TOOLS_BYTES} bytes of JSON", where)
    return tuple(tools)


def read_choice(value: Any, where: str) -> Choice:
    """Read ``tool_choice``.

    Raises:
        InvalidRequestError: It is invalid.
    """
    if isinstance(value, str) and value in WORDS:
        return next(word for word in WORDS if word == value)
    if not isinstance(value, dict) or value.get("type") != "function":
        raise InvalidRequestError(f"{where} can be {', '.join(WORDS)}, or a function", where)
    # The name is at the top here, as in responses; chats have it one level deeper.
    chosen = {"name": value["name"]} if isinstance(value.get("name"), str) else value.get("function")
    return ChosenTool("function", convert(chosen, ChosenFunction, where))


def shown_tools(tools: tuple[Tool, ...]) -> list[dict[str, Any]]:
    """Return functions in OpenAI's realtime form."""
    return [{"type": "function", **msgspec.to_builtins(tool.function)} for tool in tools]


def shown_choice(choice: Choice) -> str | dict[str, str]:
    """Return ``tool_choice`` in that form."""
    if isinstance(choice, ChosenTool):
        return {"type": "function", "name": choice.function.name}
    return choice


def refuse(error: UnsupportedError) -> None:
    """Refuse a change with all others.

    Raises:
        UnsupportedError: Always.
    """
    raise error


class _Field(NamedTuple):
    """A field of a session, which sets one of :class:`Settings`.

    Attributes:
        name: Of the setting.
        kind: The field's type.
        read: Makes the setting of a value found at a place.
        show: Makes the value of the setting.
        optional: Where it is not supported, the other changes may be made.
    """

    name: str
    kind: Any
    read: Callable[[Any, str], Any] = lambda value, _: value
    show: Callable[[Any], Any] = lambda value: value
    optional: bool = False

    def setting(self, value: Any, place: str) -> Any:
        """Return the setting of a field at this place."""
        where, _, path = place.partition(".")
        if path.startswith("audio.input.") and where != "session" and value is not None:
            belongs = f"{path.rpartition('.')[2]} belongs to the session: set it by session.update"
            raise UnsupportedError(belongs, place)
        return self.read(convert_given(whole(value), self.kind, place), place)


def _require_without(path: str, value: Any, place: str) -> None:
    """Check a field that is not honoured."""
    if path != NOISE_REDUCTION:
        require_neutral(path, value, NEUTRAL)
    elif value:
        raise UnsupportedError("noise reduction of the input is not supported: set it to null", place)


def _by_path(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return values of fields by their paths; the beta's only where no other is given."""
    given_audio = values.get("audio")
    read = convert({} if given_audio is None else given_audio, _Audio, f"{where}.audio")
    audio = msgspec.structs.asdict(read)
    found = [(path, values[name]) for name, path in BETA.items() if name in values]
    # A client's name with dots is no path.
    others = [name for name in values if name != "audio" and name not in BETA]
    found += [(name.replace(".", "/"), values[name]) for name in others]
    found += [
        (f"audio.{side}.{name}", each) for side, fields in audio.items() for name, each in fields.items()
    ]
    return {path: each for path, each in found if each is not None or path not in LEFT_OUT}


def _speech(asked: list[str], where: str) -> bool:
    if not asked or not set(asked) <= {"text", "audio"}:
        raise UnsupportedError(f'{where} can be ["audio"] or ["text"]', where)
    return "audio" in asked


def _speed(speed: float, where: str) -> float:
    require_speed(speed, where)
    return speed


def _shown_turns(turns: TurnRules | None) -> dict[str, Any] | None:
    return None if turns is None else given(msgspec.to_builtins(turns))


class _Audio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input: dict[str, Any] = {}
    output: dict[str, Any] = {}


_FORMAT: Final = FormatFields | BetaName
FIELDS: Final[Mapping[str, _Field]] = {
    "type": _Field("kind", Kind),
    "output_modalities": _Field("speech", list[str], _speech, lambda speech: ["audio" if speech else "text"]),
    "instructions": _Field("instructions", Instructions),
    "max_output_tokens": _Field(
        "max_output_tokens",
        MostTokens,
        lambda most, _: None if most == "inf" else most,
        lambda most: most or "inf",
    ),
    "temperature": _Field("temperature", Temperature),
    "tools": _Field("tools", Any, show=shown_tools),
    "tool_choice": _Field("tool_choice", Any, read_choice, shown_choice),
    "parallel_tool_calls": _Field("parallel", bool),
    "audio.input.format": _Field("input_format", _FORMAT, read_format, shown_format),
    "audio.input.turn_detection": _Field("turns", TurnRules | None, show=_shown_turns),
    "audio.input.transcription": _Field("transcription", TranscriptionRules | None, show=msgspec.to_builtins),
    "audio.output.format": _Field("output_format", _FORMAT, read_format, shown_format),
    "audio.output.voice": _Field("voice", Voice, lambda voice, _: voice_name(voice)),
    "audio.output.speed": _Field("speed", Speed, _speed, optional=True),
}
"""By their paths."""
BETA: Final[Mapping[str, str]] = {
    "modalities": "output_modalities",
    "max_response_output_tokens": "max_output_tokens",
    "voice": "audio.output.voice",
    "speed": "audio.output.speed",
    "input_audio_format": "audio.input.format",
    "output_audio_format": "audio.output.format",
    "turn_detection": "audio.input.turn_detection",
    "input_audio_transcription": "audio.input.transcription",
}
"""Paths now of the beta's fields."""
NOISE_REDUCTION: Final = "audio.input.noise_reduction"
NULLABLE: Final = frozenset({"audio.input.turn_detection", "audio.input.transcription"})
"""Fields in which null is a value: no detection of turns, no transcripts."""
LEFT_OUT: Final = frozenset({"model", *FIELDS}) - NULLABLE
"""Fields in which null counts as left out; there is no other."""
