"""Whatever a realtime client says is understood or refused with an error that is meant for it; functions."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection

from gateway.http.fields import convert_given
from gateway.http.realtime.events import _KINDS, ResponseOptions, read_event
from gateway.http.realtime.items import messages_of, read_item
from gateway.http.realtime.response import Response
from gateway.http.realtime.settings import MAX_TOOLS_BYTES, NEUTRAL, Settings, Unavailable, refuse
from gateway.http.realtime.transcription import TranscriptionRules
from omnirelay.content import ChatMessage, TextPart
from omnirelay.errors import InvalidRequestError, UnsupportedError
from tests.gateway.http_bench import HttpBench, speaking
from tests.gateway.realtime import CHUNKS, add, ask, begin, error_of, of_type, retrieve, take, update
from tests.gateway.test_http_tools import WEATHER

NAMES = st.sampled_from(
    ["type", "role", "content", "audio", "text", "input", "output", "voice", "format", "turn_detection", "id"]
)
WORDS = st.sampled_from(["message", "user", "assistant", "input_text", "input_audio", "AAAA", "?"])
NUMBERS = st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False)
KEYS = NAMES | st.sampled_from([*NEUTRAL])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([*_KINDS]), st.dictionaries(NAMES | st.just("item_id"), JSON), st.text(max_size=9))
def test_any_fields(kind: str, fields: dict[str, Any], name: str) -> None:
    told, event = read_event(json.dumps({**fields, "type": kind, "event_id": name}))
    assert (told, str(event).startswith("the body")) == (name, False)


def test_what_an_event_lacks_is_said() -> None:
    assert "type is missing" in str(read_event("{}")[1])
    assert "the event cannot be read as a JSON object" in str(read_event("[]")[1])


def changed(values: dict[str, Any], unavailable: Unavailable = refuse, where: str = "session") -> Settings:
    """A session's first settings, changed."""
    return Settings().changed(values, where, lambda _: None, unavailable)


SETTINGS = ["instructions", "temperature", "tools", "tool_choice", "input_audio_transcription", *NEUTRAL]


@given(st.dictionaries(NAMES | st.sampled_from(SETTINGS), JSON))
def test_any_settings(values: dict[str, Any]) -> None:
    try:
        settings = changed(values, lambda _: None)
    except InvalidRequestError:
        return
    assert isinstance(settings.speech, bool)
    listening = settings.shown("sess_1", "model")["audio"]["input"]
    rules = to_builtins(settings.turns) or {}
    assert (listening["turn_detection"] or {}) == {
        name: each for name, each in rules.items() if each is not None
    }


@given(st.dictionaries(NAMES, JSON), st.sampled_from(["user", "assistant", "system"]))
def test_any_item(values: dict[str, Any], role: str) -> None:
    try:
        item = read_item({**values, "role": role, "type": "message"}, "item")
    except InvalidRequestError:
        return
    assert item.parts
    assert messages_of([item])[0].role == role


def test_what_is_kept_of_an_item_is_weighed_and_nothing_else_is_kept() -> None:
    long = "x" * 100_000
    typed = read_item(
        {"role": "user", "content": [{"type": "input_text", "text": "hi", "transcript": long}]}, "item"
    )
    assert typed.shown()["content"] == [{"type": "input_text", "text": "hi"}]
    said = read_item({"role": "assistant", "content": [{"type": "output_audio", "transcript": long}]}, "item")
    assert said.shown()["content"] == [{"type": "output_audio", "transcript": long}]
    output = {"type": "function_call_output", "call_id": "a", "output": long}
    for item in (said, read_item(output, "item")):
        assert item.weight >= 2 * len(long)
    for name in ("object", "status"):
        with pytest.raises(InvalidRequestError, match=name):
            read_item({**output, name: long}, "item")


def test_a_session_shows_no_field_that_was_not_set() -> None:
    def names(value: Any) -> set[str]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        unset = {name for name, each in value.items() if each is None} if isinstance(value, dict) else set()
        return unset.union(*map(names, inner))

    function = {"type": "function", "name": "weather"}
    given = {"tools": [function], "audio": {"input": {"transcription": {"model": "whisper-1"}}}}
    settings = changed(given)
    shown = settings.shown("sess_1", "model")
    assert (names(shown), shown["max_output_tokens"]) == (set(), "inf")
    assert changed({"max_output_tokens": "inf"}) == Settings()
    assert shown["tools"] == [function]
    off = settings.changed({"turn_detection": None}, "session", lambda _: None, lambda _: None)
    assert names(off.shown("sess_1", "model")) == {"turn_detection"}


def test_metadata_of_a_response_are_bounded_as_openai_bounds_them_and_its_items() -> None:
    for metadata in ({"a": "x" * 513}, {"a" * 65: "x"}, {str(number): "x" for number in range(17)}):
        with pytest.raises(InvalidRequestError):
            convert_given({"metadata": metadata}, ResponseOptions, "response")
    with pytest.raises(InvalidRequestError, match=r"response\.input: .* <= 512"):
        # 43,000 references to a result, which are joined, stopped the gateway for 4 s.
        convert_given({"input": [{}] * 513}, ResponseOptions, "response")
    kept = {"a" * 64: "x" * 512}
    assert convert_given({"metadata": kept}, ResponseOptions, "response").metadata == kept


def test_only_those_labels_of_a_transcription_that_were_given_are_shown() -> None:
    rules = convert_given({"model": "whisper-1", "language": None}, TranscriptionRules)
    assert to_builtins(rules) == {"model": "whisper-1"}


TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.mark.parametrize("speech", [True, False])
async def test_a_call_and_its_result(roomy: HttpBench, c: Connection, speech: bool) -> None:
    b = roomy
    shown = (await update(c, tools=[TOOL], output_modalities=["audio"] if speech else ["text"])).session
    assert (shown.tools[0].name, shown.tool_choice) == ("weather", "auto")
    request = await begin(b, c)
    assert "Tells the weather." in b.prompt_of(request)
    name = request.request_id
    for seq, piece in enumerate((WEATHER, f"\n{WEATHER}")):
        await b.stages.text(name, seq, b.encode(piece), "stop" if seq else None)
    if speech:
        # The response does not wait for speech that nobody is to hear.
        await b.stages.aborted(name)
    events = await take(c, "response.done")
    kinds = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    added, *arguments = [f"response.{kind}" for kind in kinds]
    done = ["conversation.item.done", "response.output_item.done"]
    one = [added, "conversation.item.added", *arguments, *done]
    assert [event.type for event in events[1:]] == [*one * 2, "response.done"]
    dones = of_type(events, "response.function_call_arguments.done")
    called = [(each.name, json.loads(each.arguments)) for each in dones]
    assert called == [("weather", {"city": "Ulm"})] * 2
    response = events[-1].response
    assert response.status == "completed"
    calls = response.output
    assert [each.type for each in calls] == ["function_call"] * 2
    assert len({each.call_id for each in calls}) == len({each.id for each in calls}) == 2
    assert response.usage.input_tokens > 0 < response.usage.output_tokens
    for call, result in zip(calls, ("rain", "sun"), strict=True):
        item: Any = {"type": "function_call_output", "call_id": call.call_id, "output": result}
        await c.conversation.item.create(item=item)
        shown = (await take(c, "conversation.item.done"))[-1].item
        assert (shown.type, shown.output) == ("function_call_output", result)
    async with speaking(b, "It rains.", CHUNKS):
        again = await ask(c)
    assert again[-1].response.output[0].type == "message"
    prompt = b.prompt_of(b.stages.requests[1])
    call_text = '<tool_call>\n{"name":"weather","arguments":{"city":"Ulm"}}\n</tool_call>'
    assert f"{call_text}\n{call_text}" in prompt
    results = [f"<tool_response>\n{each}\n</tool_response>" for each in ("rain", "sun")]
    assert "\n".join(results) in prompt


@pytest.mark.parametrize(
    "at",
    [
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.function_call_arguments.delta",
    ],
)
async def test_what_has_begun_ends_whenever_it_is_cancelled(
    roomy: HttpBench, c: Connection, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    begin = Response.__post_init__

    def watched(response: Response) -> None:
        begin(response)
        send = response._send

        async def cancelling(kind: str, fields: dict[str, Any]) -> None:
            if kind == at:
                asyncio.get_running_loop().call_soon(response.cancel)
            await send(kind, fields)

        response._send = cancelling

    await update(c, tools=[TOOL], output_modalities=["text"])
    await add(c)
    monkeypatch.setattr(Response, "__post_init__", watched)
    async with speaking(roomy, WEATHER if "call" in at else "Hello", []):
        events = await ask(c)
    kinds = Counter(each.type for each in events)
    for part in ("response.output_item", "conversation.item", "response.content_part"):
        assert kinds[f"{part}.added"] == kinds[f"{part}.done"]
    assert kinds["conversation.item.added"] == 1
    assert [each.status for each in events[-1].response.output] != ["in_progress"]
    # It is in the conversation.
    await retrieve(c, events[-1].response.output[0].id)


async def test_an_answer_that_is_deleted_while_it_is_made_does_not_come_back(
    web: HttpBench, c: Connection
) -> None:
    name = (await begin(web, c)).request_id
    await web.stages.text(name, 0, web.encode("One two"))
    added = (await take(c, "conversation.item.added"))[-1].item
    await c.conversation.item.delete(item_id=added.id)
    await take(c, "conversation.item.deleted")
    await c.response.cancel()
    assert not of_type(await take(c, "response.done"), "conversation.item.done")


async def test_what_is_said_before_a_call_is_spoken(roomy: HttpBench, c: Connection) -> None:
    b = roomy
    await update(c, tools=[TOOL])
    name = (await begin(b, c)).request_id
    await b.stages.text(name, 0, b.encode("Let me see."))
    await b.stages.audio(name, 0, CHUNKS[0].tobytes())
    await take(c, "response.output_audio.delta")
    await b.stages.text(name, 1, b.encode(f"\n{WEATHER}"))
    await take(c, "response.function_call_arguments.done")
    await b.stages.audio(name, 1, CHUNKS[1].tobytes())
    await b.stages.text(name, 2, b.encode("\n"), "stop")
    events = await take(c, "response.done")
    assert not of_type(events, "response.output_audio.delta")
    said, call = events[-1].response.output
    assert said.content[0].transcript == "Let me see."
    assert (said.status, call.status) == ("completed", "completed")
    [done] = of_type(events, "response.output_audio_transcript.done")
    assert (done.output_index, done.transcript) == (0, "Let me see.")
    assert await retrieve(c, call.id) == call


async def test_malformed_calls_are_text(roomy: HttpBench, c: Connection) -> None:
    answer = '<tool_call>{"name": "rockets", "arguments": {}}</tool_call>'
    async with speaking(roomy, answer, CHUNKS):
        await update(c, tools=[TOOL], output_modalities=["text"])
        await add(c)
        for _ in range(2):
            [item] = (await ask(c))[-1].response.output
            assert item.content[0].text == answer


async def test_a_call_that_must_be_made(roomy: HttpBench, c: Connection) -> None:
    async with speaking(roomy, '{"name": "weather", "arguments": {"city": "Ulm"}}', CHUNKS):
        await add(c)
        events = await ask(c, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
        assert [each.name for each in events[-1].response.output] == ["weather"]
        request = roomy.stages.requests[0]
        assert request.speech is None
        assert json.loads(request.sampling.json_schema or "")["properties"]["name"] == {"const": "weather"}
        # Of the response only: the session has no functions.
        await c.response.create(response={"tool_choice": "required"})
        assert (await error_of(c)).param == "tool_choice"


def test_functions_in_settings() -> None:
    tools = [TOOL, {**TOOL, "name": "other"}]
    settings = changed({"tools": tools, "tool_choice": "auto", "parallel_tool_calls": False})
    assert settings.shown("sess", "model")["tools"] == tools
    chosen = {"type": "function", "name": "weather"}
    assert changed({"tool_choice": chosen}).shown("sess", "model")["tool_choice"] == chosen
    assert not changed({"tool_choice": "none", "tools": [TOOL]}).call_parser().names
    messages = [ChatMessage("user", "Hello")]
    spoken = settings.instructed(messages, "Speak.")
    assert spoken[0].role == "system"
    assert isinstance(spoken[0].content, list)
    assert spoken[0].content[0] == TextPart("Speak.")
    assert Settings().instructed(messages, "Speak.") == messages


def test_tools_that_are_no_functions_are_left_out_of_a_session_with_a_warning() -> None:
    warnings: list[UnsupportedError] = []
    tools = [{"type": "mcp", "server_label": "x"}, TOOL]
    settings = changed({"tools": tools}, warnings.append)
    assert [tool.function.name for tool in settings.tools] == ["weather"]
    assert [each.param for each in warnings] == ["session.tools[0].type"]


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": value}
    return value


TURNS, TRANSCRIPTS = "audio.input.turn_detection", "audio.input.transcription"
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tempo", {"tempo": None}),
    ("nothing", {"nothing": 1}),
    ("audio", {"audio": 0}),
    ("audio.tempo", {"audio": {"tempo": {}}}),
    ("audio.input.tempo", {"audio": {"input": {"tempo": None}}}),
    ("audio/output/voice", {"audio.output.voice": "Chelsie"}),
    ("type", {"type": "translation"}),
    ("instructions", {"instructions": "x" * (2**20 + 1)}),
    ("temperature", {"temperature": 9}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_output_tokens", {"max_output_tokens": "many"}),
    ("tools", {"tools": "weather"}),
    ("tools", {"tools": [TOOL] * 129}),
    ("tools", {"tools": [{**TOOL, "description": "x" * MAX_TOOLS_BYTES}]}),
    ("tools[0]", {"tools": [1]}),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("tools[0].name", {"tools": [{**TOOL, "name": "no spaces"}]}),
    ("tools[0].name", {"tools": [{**TOOL, "name": ["weather"]}]}),
    ("tools[0].parameters", {"tools": [{**TOOL, "parameters": "{}"}]}),
    ("tools[0].parameters", {"tools": [{**TOOL, "parameters": deep(500)}]}),
    ("tools[0].secret", {"tools": [{**TOOL, "parameters": deep(100), "secret": 1}]}),
    ("tool_choice", {"tool_choice": "some"}),
    ("tool_choice", {"tool_choice": {"type": "function"}}),
    ("tool_choice", {"tool_choice": {"type": "mcp", "name": "x"}}),
    ("tool_choice", {"tool_choice": 3}),
    ("parallel_tool_calls", {"parallel_tool_calls": "yes"}),
    ("audio.input.format", {"input_audio_format": "g711"}),
    ("audio.input.format.rate", {"audio": {"input": {"format": {"type": "audio/pcmu", "rate": 24000}}}}),
    ("audio.input.format.type", {"input_audio_format": {"type": "audio/opus"}}),
    ("audio.output.format.rate", {"audio": {"output": {"format": {"rate": 16000}}}}),
    ("audio.output.speed", {"audio": {"output": {"speed": 1.6}}}),
    ("audio.output.speed", {"audio": {"output": {"speed": 0.2}}}),
    (TRANSCRIPTS, {"input_audio_transcription": "whisper-1"}),
    (TRANSCRIPTS, {"input_audio_transcription": []}),
    (f"{TRANSCRIPTS}.model", {"input_audio_transcription": {"model": 1}}),
    (f"{TRANSCRIPTS}.model", {"input_audio_transcription": {"model": "x" * 129}}),
    (f"{TRANSCRIPTS}.delay", {"input_audio_transcription": {"delay": "x" * 129}}),
    (f"{TRANSCRIPTS}.prompt", {"input_audio_transcription": {"prompt": "x" * 65_537}}),
    (f"{TRANSCRIPTS}.keywords", {"input_audio_transcription": {"keywords": ["x"] * 257}}),
    (f"{TRANSCRIPTS}.languages", {"input_audio_transcription": {"languages": ["de"] * 65}}),
    (f"{TRANSCRIPTS}.secret", {"input_audio_transcription": {"secret": True}}),
    (TURNS, {"turn_detection": "server_vad"}),
    (TURNS, {"turn_detection": 7}),
    (f"{TURNS}.type", {"turn_detection": {}}),
    (f"{TURNS}.type", {"turn_detection": {"type": "push_to_talk"}}),
    (f"{TURNS}.threshold", {"turn_detection": {"type": "server_vad", "threshold": 2}}),
    (f"{TURNS}.idle_timeout_ms", {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 10}}),
    (f"{TURNS}.eagerness", {"turn_detection": {"type": "server_vad", "eagerness": "low"}}),
    (f"{TURNS}.threshold", {"turn_detection": {"type": "semantic_vad", "threshold": 0.5}}),
]
NOT_DONE: list[tuple[str, dict[str, Any]]] = [
    ("session.output_modalities", {"output_modalities": ["smell"]}),
    ("session.output_modalities", {"output_modalities": []}),
    ("session.tools[0].type", {"tools": [{"type": "web_search"}]}),
    # These belong to the session.
    (f"response.{TURNS}", {"turn_detection": {"type": "server_vad"}}),
    (f"response.{TRANSCRIPTS}", {"input_audio_transcription": {}}),
    ("response.audio.input.format", {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}),
]


@pytest.mark.parametrize(
    ("param", "values", "kind"),
    [
        *((f"session.{param}", values, InvalidRequestError) for param, values in REFUSED),
        *((param, values, UnsupportedError) for param, values in NOT_DONE),
    ],
    ids=lambda value: str(value)[:50],
)
def test_settings_that_are_refused(param: str, values: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        changed(values, where=param.partition(".")[0])
    assert (type(caught.value), caught.value.param) == (kind, param)


SAID = {"type": "input_text", "text": "Hello"}


@pytest.mark.parametrize(
    "values",
    [
        {"type": "function_call", "name": "weather"},
        {"type": "function_call", "name": "no spaces", "arguments": "{}"},
        {"type": "function_call_output", "output": "rain"},
        {"type": "function_call_output", "call_id": "", "output": "rain"},
        {"type": "function_call_output", "call_id": "call_1", "output": {"rain": True}},
        {"type": "function_call_output", "call_id": "call_1", "output": "x" * (2**20 + 1)},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain", "role": "user"},
        {"type": "mcp_call", "name": "x"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]},
        {"role": "user", "content": []},
        {"role": "user", "content": [SAID] * 65},
        {"role": "user", "content": [SAID], "id": ""},
        {"role": "user", "content": [SAID], "id": "x" * 65},
    ],
    ids=lambda value: str(value)[:70],
)
def test_items_that_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_item(values, "item")
    assert (caught.value.param or "").startswith("item")


def test_an_item_may_have_64_parts_and_an_id_as_long() -> None:
    item = read_item({"role": "user", "content": [SAID] * 64, "id": "x" * 64}, "item")
    assert (len(item.parts), item.id) == (64, "x" * 64)


def test_items_of_calls_as_the_model_reads_them() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
    call = {"type": "function_call", "name": "weather", "arguments": "[" * 5000, "call_id": "call_1"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    items = [read_item(each, "item") for each in (said, call, result, result, said)]
    messages = messages_of(items)
    assert [each.role for each in messages] == ["assistant", "user", "assistant"]
    texts = ["".join(part.text for part in each.content) for each in messages]  # type: ignore[union-attr]
    assert texts[0].startswith("Well.\n<tool_call>\n")
    assert texts[1] == "\n".join(["<tool_response>\nrain\n</tool_response>"] * 2)
