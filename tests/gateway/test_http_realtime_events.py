"""Whatever a realtime client says is understood or refused with an error that is meant for it; functions."""

import asyncio
import json
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection

from gateway.fairness.quota import Hold, MemoryBudget
from gateway.http.fields import convert_given
from gateway.http.realtime.conversation import MAX_ITEMS, RealtimeConversation
from gateway.http.realtime.events import _KINDS, ResponseOptions, read_event
from gateway.http.realtime.functions import MAX_TOOLS_BYTES
from gateway.http.realtime.input.buffers import InputAudio
from gateway.http.realtime.input.transcription import TranscriptionRules
from gateway.http.realtime.items import BYTES_PER_S, HEADER_BYTES, Item, messages_of, read_item
from gateway.http.realtime.response import Response
from gateway.http.realtime.settings import NEUTRAL, Settings, refuse
from omnirelay.content import AudioPart, ChatMessage, TextPart
from omnirelay.errors import (
    BusyError,
    InvalidRequestError,
    MediaTooLargeError,
    OmniRelayError,
    UnsupportedError,
)
from shared.config import MediaConfig
from shared.messages import ThinkRequest
from tests.gateway.http_bench import HttpBench, speaking
from tests.gateway.realtime import CHUNKS, add, ask, begin, error_of, of_type, retrieve, take, update
from tests.gateway.test_http_tools import WEATHER

NAMES = st.sampled_from(
    ["type", "role", "content", "audio", "text", "input", "output", "voice", "format", "turn_detection", "id"]
)
WORDS = st.sampled_from(
    ["message", "user", "assistant", "input_text", "input_audio", "input_image", "AAAA", "?"]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.sampled_from([*NEUTRAL]), inner),
    max_leaves=12,
)


def held(limit: int = 10**9) -> Hold:
    return MemoryBudget(limit, lambda: 100).of("")


@given(st.sampled_from([*_KINDS]), st.dictionaries(NAMES | st.just("item_id"), JSON), st.text(max_size=9))
def test_any_fields(kind: str, fields: dict[str, Any], name: str) -> None:
    told, event = read_event(json.dumps({**fields, "type": kind, "event_id": name}))
    assert (told, str(event).startswith("the body")) == (name, False)


def test_what_an_event_lacks_is_said() -> None:
    assert "type is missing" in str(read_event("{}")[1])
    assert "the event cannot be read as a JSON object" in str(read_event("[]")[1])


SETTINGS = ["instructions", "temperature", "tools", "tool_choice", "input_audio_transcription", *NEUTRAL]


@given(st.dictionaries(NAMES | st.sampled_from(SETTINGS), JSON))
def test_any_settings(values: dict[str, Any]) -> None:
    try:
        settings = Settings().changed(values, "session", lambda _: None, lambda _: None)
    except InvalidRequestError:
        return
    assert isinstance(settings.speech, bool)
    listening = settings.shown("sess_1", "model")["audio"]["input"]
    rules = to_builtins(settings.turns) or {}
    assert (listening["turn_detection"] or {}) == {
        name: each for name, each in rules.items() if each is not None
    }


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"tempo": None}, "session.tempo"),
        ({"audio": {"input": {"tempo": None}}}, "session.audio.input.tempo"),
        ({"audio": {"tempo": {}}}, "session.audio.tempo"),
        ({"audio": 0}, "session.audio"),
        ({"audio.output.voice": "Chelsie"}, "session.audio/output/voice"),
    ],
)
def test_no_such_field(values: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as found:
        Settings().changed(values, "session", lambda _: None, refuse)
    assert found.value.param == param


@given(st.dictionaries(NAMES, JSON), st.sampled_from(["user", "assistant", "system"]))
def test_any_item(values: dict[str, Any], role: str) -> None:
    try:
        item = read_item({**values, "role": role, "type": "message"}, "item")
    except InvalidRequestError:
        return
    assert item.parts
    assert messages_of([item])[0].role == role


@given(st.lists(st.integers(0, 3000), max_size=12), st.integers(1, 8000))
def test_what_is_appended_is_committed_or_refused(sizes: list[int], limit: int) -> None:
    room = held()
    audio = InputAudio(MediaConfig(max_audio_seconds=limit / BYTES_PER_S), room)
    kept = b""
    for at, size in enumerate(sizes):
        piece = bytes([at + 1]) * size
        try:
            asyncio.run(audio.append(piece))
        except MediaTooLargeError:
            assert len(kept) + size > math.floor(limit / BYTES_PER_S * BYTES_PER_S)
        else:
            kept += piece
        assert room.budget.total == len(kept)
    if not kept or len(kept) % 2:
        with pytest.raises(InvalidRequestError):
            audio.commit()
        audio.clear()
    else:
        wav, hold = audio.commit()
        assert bytes(wav[HEADER_BYTES:]) == kept
        hold.release()
    assert room.budget.total == 0


@given(st.lists(st.sampled_from(["text", "sound", "drop"]), max_size=30))
def test_a_conversation_always_fits_into_a_request(steps: list[str]) -> None:
    room = held(5000)
    media = MediaConfig(max_audios=2, max_request_bytes=1000, max_item_bytes=1000)
    conversation = RealtimeConversation(media, room)
    items: list[Item] = []
    for step in steps:
        if step == "drop" and items:
            conversation.remove(items.pop(0).id)
            continue
        part = AudioPart(data=memoryview(bytes(300))) if step == "sound" else TextPart("x" * 100)
        item = Item("user", [part], [])
        assert conversation.add(item) == (items[-1].id if items else None)
        items.append(item)
        forgotten = conversation.make_room()
        assert forgotten == items[: len(forgotten)]
        items = items[len(forgotten) :]
        assert len(conversation.messages()) == len(items) <= MAX_ITEMS
        assert room.budget.total == sum(each.weight for each in items) <= 1000
        assert sum(isinstance(each.parts[0], AudioPart) for each in items) <= 2
    conversation.clear()
    assert room.budget.total == 0


def test_no_more_is_kept_than_there_is_room_for_all() -> None:
    room = held(500)
    first, second = RealtimeConversation(MediaConfig(), room), RealtimeConversation(MediaConfig(), room)
    first.add(Item("user", [TextPart("x" * 400)], []))
    with pytest.raises(BusyError):
        second.add(Item("user", [TextPart("x" * 400)], []))
    with pytest.raises(OmniRelayError):
        first.get("nobody")
    first.clear()
    second.add(Item("user", [TextPart("x" * 400)], []))
    assert room.budget.total == 400


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
    settings = Settings().changed(given, "session", lambda _: None, lambda _: None)
    shown = settings.shown("sess_1", "model")
    assert names(shown) == set()
    assert shown["tools"] == [function]
    off = settings.changed({"turn_detection": None}, "session", lambda _: None, lambda _: None)
    assert names(off.shown("sess_1", "model")) == {"turn_detection"}


def test_metadata_of_a_response_are_bounded_as_openai_bounds_them() -> None:
    for metadata in ({"a": "x" * 513}, {"a" * 65: "x"}, {str(number): "x" for number in range(17)}):
        with pytest.raises(InvalidRequestError):
            convert_given({"metadata": metadata}, ResponseOptions, "response")
    kept = {"a" * 64: "x" * 512}
    assert convert_given({"metadata": kept}, ResponseOptions, "response").metadata == kept


def test_labels_of_a_transcription_are_bounded_and_only_those_given_are_shown() -> None:
    rules = convert_given({"model": "whisper-1", "language": None}, TranscriptionRules)
    assert to_builtins(rules) == {"model": "whisper-1"}
    for values in ({"model": "x" * 129}, {"delay": "x" * 129}, {"languages": ["de"] * 65}):
        with pytest.raises(InvalidRequestError, match="length"):
            convert_given(values, TranscriptionRules)


TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def told(b: HttpBench, request: ThinkRequest) -> str:
    """The prompt's text without special tokens."""
    token_bytes = b.process.gateway.prompts.token_bytes
    return b"".join(token_bytes(each) or b"" for each in request.prompt_token_ids).decode()


@pytest.mark.parametrize("speech", [True, False])
async def test_a_call_and_its_result(roomy: HttpBench, c: Connection, speech: bool) -> None:
    b = roomy
    shown = (await update(c, tools=[TOOL], output_modalities=["audio"] if speech else ["text"])).session
    assert (shown.tools[0].name, shown.tool_choice) == ("weather", "auto")
    request = await begin(b, c)
    assert "Tells the weather." in told(b, request)
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
    prompt = told(b, b.stages.requests[1])
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
    def changed(**values: Any) -> Settings:
        return Settings().changed(values, "session", lambda _: None, refuse)

    settings = changed(tools=[TOOL, {**TOOL, "name": "other"}], tool_choice="auto", parallel_tool_calls=False)
    assert settings.shown("sess", "model")["tools"] == [TOOL, {**TOOL, "name": "other"}]
    chosen = {"type": "function", "name": "weather"}
    assert changed(tool_choice=chosen).shown("sess", "model")["tool_choice"] == chosen
    assert not changed(tool_choice="none", tools=[TOOL]).call_parser().names
    messages = [ChatMessage("user", "Hello")]
    spoken = settings.instructed(messages, "Speak.")
    assert spoken[0].role == "system"
    assert isinstance(spoken[0].content, list)
    assert spoken[0].content[0] == TextPart("Speak.")
    assert Settings().instructed(messages, "Speak.") == messages


def test_tools_that_are_no_functions_are_left_out_of_a_session_with_a_warning() -> None:
    warnings: list[UnsupportedError] = []
    tools = [{"type": "mcp", "server_label": "x"}, TOOL]
    settings = Settings().changed({"tools": tools}, "session", lambda _: None, warnings.append)
    assert [tool.function.name for tool in settings.tools] == ["weather"]
    assert [each.param for each in warnings] == ["session.tools[0].type"]


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": value}
    return value


@pytest.mark.parametrize(
    "values",
    [
        {"tools": "weather"},
        {"tools": [1]},
        {"tools": [TOOL] * 129},
        {"tools": [{"type": "function"}]},
        {"tools": [{**TOOL, "name": "no spaces"}]},
        {"tools": [{**TOOL, "name": ["weather"]}]},
        {"tools": [{**TOOL, "parameters": "{}"}]},
        {"tools": [{**TOOL, "parameters": deep(500)}]},
        {"tools": [{**TOOL, "parameters": deep(100), "secret": 1}]},
        {"tools": [{**TOOL, "description": "x" * MAX_TOOLS_BYTES}]},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": "some"},
        {"tool_choice": {"type": "function"}},
        {"tool_choice": {"type": "mcp", "name": "x"}},
        {"tool_choice": 3},
        {"parallel_tool_calls": "yes"},
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Settings().changed(values, "session", lambda _: None, refuse)
    assert caught.value.param is not None


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
    ],
    ids=lambda value: str(value)[:70],
)
def test_items_that_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_item(values, "item")
    assert (caught.value.param or "").startswith("item")


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
