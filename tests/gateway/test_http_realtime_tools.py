"""Functions in realtime sessions: what the model is told, its calls, their results, and what is refused."""

import json
from typing import Any

import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from gateway.http.realtime.functions import MAX_TOOLS_BYTES
from gateway.http.realtime.items import messages_of, read_item
from gateway.http.realtime.settings import Settings, refuse
from omnirelay.content import ChatMessage, TextPart
from omnirelay.errors import InvalidRequestError, UnsupportedError
from shared.messages import ThinkRequest
from tests.gateway.bench import Configure
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway, speaking
from tests.gateway.test_http_realtime import CHUNKS, HELLO, ask, idle, of_type, take, talking
from tests.gateway.test_http_tools import WEATHER

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


async def roomy(b: HttpBench) -> None:
    """The checkpoint of these tests has few positions; the description of a function needs more."""
    b.stages.max_positions = 4096
    await until(lambda: b.process.gateway.registry.max_positions("thinker") == 4096)


async def update(c: AsyncRealtimeConnection, **session: Any) -> Any:
    event: Any = {"type": "session.update", "session": {"type": "realtime", **session}}
    await c.send(event)
    return (await take(c, "session.updated"))[-1]


def told(b: HttpBench, request: ThinkRequest) -> str:
    """The prompt's text without special tokens."""
    token_bytes = b.process.gateway.prompts.token_bytes
    return b"".join(token_bytes(each) or b"" for each in request.prompt_token_ids).decode()


@pytest.mark.parametrize("speech", [True, False])
async def test_a_call_and_its_result(configure: Configure, speech: bool) -> None:
    async with http_bench(configure(http_gateway())) as b, talking(b) as c:
        await roomy(b)
        modalities = ["audio"] if speech else ["text"]
        shown = (await update(c, tools=[TOOL], output_modalities=modalities)).session
        assert shown.tools[0].name == "weather"
        assert shown.tool_choice == "auto"
        await c.conversation.item.create(item=HELLO)
        await take(c, "conversation.item.done")
        await c.response.create()
        request = await b.stages.request(0)
        assert "Tells the weather." in told(b, request)
        name = request.request_id
        for seq, piece in enumerate((WEATHER, f"\n{WEATHER}")):
            await b.stages.text(name, seq, b.encode(piece), "stop" if seq else None)
        if speech:
            # The response does not wait for speech that nobody is to hear.
            await b.stages.aborted(name)
        events = await take(c, "response.done")
        assert [event.type for event in events[1:]] == [
            *[
                "response.output_item.added",
                "conversation.item.added",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "conversation.item.done",
                "response.output_item.done",
            ]
            * 2,
            "response.done",
        ]
        dones = of_type(events, "response.function_call_arguments.done")
        assert [(each.name, json.loads(each.arguments)) for each in dones] == [
            ("weather", {"city": "Ulm"})
        ] * 2
        response = events[-1].response
        assert response.status == "completed"
        calls = response.output
        assert [each.type for each in calls] == ["function_call"] * 2
        assert len({each.call_id for each in calls}) == len({each.id for each in calls}) == 2
        assert response.usage.input_tokens > 0 < response.usage.output_tokens
        for call, result in zip(calls, ("rain", "sun"), strict=True):
            item: Any = {"type": "function_call_output", "call_id": call.call_id, "output": result}
            await c.conversation.item.create(item=item)
            added = (await take(c, "conversation.item.done"))[-1]
            assert (added.item.type, added.item.output) == ("function_call_output", result)
        async with speaking(b, "It rains.", CHUNKS):
            again = await ask(c)
        assert again[-1].response.output[0].type == "message"
        prompt = told(b, b.stages.requests[1])
        call_text = '<tool_call>\n{"name":"weather","arguments":{"city":"Ulm"}}\n</tool_call>'
        assert f"{call_text}\n{call_text}" in prompt
        results = [f"<tool_response>\n{each}\n</tool_response>" for each in ("rain", "sun")]
        assert "\n".join(results) in prompt
    await idle(b)


async def test_what_is_said_before_a_call_is_spoken_and_the_call_is_not(configure: Configure) -> None:
    async with http_bench(configure(http_gateway())) as b, talking(b) as c:
        await roomy(b)
        await update(c, tools=[TOOL])
        await c.conversation.item.create(item=HELLO)
        await take(c, "conversation.item.done")
        await c.response.create()
        name = (await b.stages.request(0)).request_id
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
        await c.conversation.item.retrieve(item_id=call.id)
        assert (await take(c, "conversation.item.retrieved"))[-1].item == call
    await idle(b)


async def test_malformed_calls_are_text_and_the_session_goes_on(configure: Configure) -> None:
    answer = '<tool_call>{"name": "rockets", "arguments": {}}</tool_call>'
    async with http_bench(configure(http_gateway())) as b, speaking(b, answer, CHUNKS), talking(b) as c:
        await roomy(b)
        await update(c, tools=[TOOL], output_modalities=["text"])
        await c.conversation.item.create(item=HELLO)
        await take(c, "conversation.item.done")
        for _ in range(2):
            [item] = (await ask(c))[-1].response.output
            assert item.content[0].text == answer
    await idle(b)


async def test_a_call_that_must_be_made(configure: Configure) -> None:
    answer = '{"name": "weather", "arguments": {"city": "Ulm"}}'
    async with http_bench(configure(http_gateway())) as b, speaking(b, answer, CHUNKS), talking(b) as c:
        await roomy(b)
        await c.conversation.item.create(item=HELLO)
        await take(c, "conversation.item.done")
        events = await ask(c, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
        assert [each.name for each in events[-1].response.output] == ["weather"]
        request = b.stages.requests[0]
        assert request.speech is None
        assert json.loads(request.sampling.json_schema or "")["properties"]["name"] == {"const": "weather"}
        # Of the response only: the session has no functions.
        await c.response.create(response={"tool_choice": "required"})
        error = (await take(c, "error"))[-1].error
        assert error.param == "tool_choice"
    await idle(b)


def test_functions_in_settings() -> None:
    def changed(**values: Any) -> Settings:
        return Settings().changed(values, "session", lambda _: None, refuse)

    settings = changed(tools=[TOOL, {**TOOL, "name": "other"}], tool_choice="auto", parallel_tool_calls=False)
    assert settings.shown("sess", "model")["tools"] == [TOOL, {**TOOL, "name": "other"}]
    chosen = {"type": "function", "name": "weather"}
    assert changed(tool_choice=chosen).shown("sess", "model")["tool_choice"] == chosen
    assert changed(tool_choice="none", tools=[TOOL]).call_parser() is None
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
    ],
    ids=lambda value: str(value)[:70],
)
def test_items_that_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        read_item(values, "item")


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
