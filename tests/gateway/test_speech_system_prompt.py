"""The system message of requests that speak: whose it is, by each of the ways to ask."""

from typing import Any

import pytest

from omnirelay import ChatMessage, GenerateRequest
from omnirelay.errors import PromptTooLongError
from shared.families.qwen2_5_omni import SPEECH_SYSTEM_PROMPT
from tests.gateway.bench import Bench, Configure, bench
from tests.gateway.http_bench import HI, MODEL, HttpBench, cut, http_bench, http_gateway, melody, speaking
from tests.gateway.test_http_realtime import HELLO, ask, talking

TEMPLATES_OWN = "You are a helpful assistant."
SPEECH: Any = {"modalities": ["text", "audio"]}


def system_messages(b: Bench | HttpBench) -> list[str]:
    """The system messages of the prompts that the thinker was given."""
    tokenizer = b.process._prompts._tokenizer
    prompts = [
        tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) for request in b.stages.requests
    ]
    assert all(
        prompt.startswith("<|im_start|>system\n") and prompt.count("system\n") == 1 for prompt in prompts
    )
    return [prompt.removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0] for prompt in prompts]


@pytest.mark.parametrize("prompt", [None, "", "Speak slowly.", SPEECH_SYSTEM_PROMPT], ids=str)
async def test_over_tcp(configure: Configure, prompt: str | None) -> None:
    config = configure({} if prompt == SPEECH_SYSTEM_PROMPT else {"speech_system_prompt": prompt})
    asked: list[tuple[dict[str, Any], str]] = [
        ({}, prompt or TEMPLATES_OWN),
        ({"system": "Be brief."}, "Be brief."),
        ({"speech": False}, TEMPLATES_OWN),
        ({"speech": False, "system": "Be brief."}, "Be brief."),
    ]

    async with bench(config) as b, b.client() as client:
        for count, (options, _) in enumerate(asked):
            client.chat("Hi", **options)
            await b.stages.request(count)
        assert system_messages(b) == [expected for _, expected in asked]
        ids = b.encode("Hello")
        client.chat(GenerateRequest(prompt_token_ids=ids))
        assert (await b.stages.request(len(asked))).prompt_token_ids == ids


async def test_it_counts_in_the_length_of_the_prompt(configure: Configure) -> None:
    async with bench(configure()) as b, b.client() as client:
        for count, speech in enumerate((False, True)):
            client.chat("Hi", speech=speech)
            await b.stages.request(count)
        text_only, spoken = (len(request.prompt_token_ids) for request in b.stages.requests)
    assert text_only < spoken
    async with bench(configure(max_prompt_tokens=spoken - 1)) as b, b.client() as client:
        with pytest.raises(PromptTooLongError, match=f"has {spoken} tokens"):
            await client.chat("Hi").result()
        client.chat([ChatMessage("user", "Hi")], speech=False)
        assert len((await b.stages.request(0)).prompt_token_ids) == text_only


async def test_over_http(configure: Configure) -> None:
    brief: Any = [{"role": "developer", "content": "Be brief."}, *HI]

    async with http_bench(configure(http_gateway())) as b, speaking(b, "Hi!", cut(melody(0.5), [])):
        for messages, options in ((HI, SPEECH), (brief, SPEECH), (HI, {})):
            await b.ai.chat.completions.create(model=MODEL, messages=messages, **options)
        await b.ai.audio.speech.create(model=MODEL, voice="Ethan", input="Hello", response_format="pcm")
        spoken, developers, written, read = system_messages(b)
        assert (spoken, developers, written) == (SPEECH_SYSTEM_PROMPT, "Be brief.", TEMPLATES_OWN)
        assert read == SPEECH_SYSTEM_PROMPT


async def test_in_a_realtime_session(web: HttpBench) -> None:
    async with speaking(web, "Hi!", cut(melody(0.5), [])):
        async with talking(web) as c:
            await c.conversation.item.create(item=HELLO)
            for _ in range(2):
                await c.recv()
            await ask(c)
            await ask(c, instructions="Be brief.")
            await ask(c, output_modalities=["text"])
        assert system_messages(web) == [SPEECH_SYSTEM_PROMPT, "Be brief.", TEMPLATES_OWN]


async def test_instructions_alone_are_answered(configure: Configure) -> None:
    alone: Any = [{"role": "system", "content": "Greet."}]

    async with http_bench(configure(http_gateway())) as b, speaking(b, "Hi!", cut(melody(0.5), [])):
        await b.ai.chat.completions.create(model=MODEL, messages=alone, **SPEECH)
        async with talking(b) as c:
            for options in ({}, {"conversation": "none", "input": []}):
                last = (await ask(c, instructions="Greet.", **options))[-1]
                assert last.response.status == "completed"
        assert system_messages(b) == ["Greet."] * 3
