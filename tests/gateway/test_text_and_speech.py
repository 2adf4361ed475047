"""Text and speech: whose system message speech has, and a stack of gateway and thinker alone."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from omnirelay import ChatMessage, Client, GenerateRequest
from omnirelay.cli.status import describe
from omnirelay.errors import InvalidRequestError, PromptTooLongError
from ops.doctor import machine, network
from shared.config import Config
from shared.families.qwen2_5_omni import SPEECH_SYSTEM_PROMPT
from tests.gateway.bench import Bench, Configure, bench, fails
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import MODEL, HttpBench, cut, http_bench, http_gateway, melody, speaking
from tests.gateway.realtime import HELLO, ask, talking
from tests.gateway.test_processes import end, read_until, start

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
        await fails(client.chat("Hi"), PromptTooLongError, f"has {spoken} tokens")
        client.chat([ChatMessage("user", "Hi")], speech=False)
        assert len((await b.stages.request(0)).prompt_token_ids) == text_only


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


async def test_instructions_alone_are_answered(web: HttpBench) -> None:
    alone: Any = [{"role": "system", "content": "Greet."}]
    async with speaking(web, "Hi!", cut(melody(0.5), [])):
        await web.ai.chat.completions.create(model=MODEL, messages=alone, **SPEECH)
        async with talking(web) as c:
            for options in ({}, {"conversation": "none", "input": []}):
                last = (await ask(c, instructions="Greet.", **options))[-1]
                assert last.response.status == "completed"
        assert system_messages(web) == ["Greet."] * 3


READ = {"model": MODEL, "input": "Hi", "voice": "Chelsie"}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie"}}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def test_a_gateway_of_text_needs_the_thinker_alone(configure: Configure) -> None:
    config = configure(http_gateway()).model_copy(update={"text_only": True})
    async with http_bench(config, ready=False, alive=["thinker"]) as b, b.client() as client:
        await until(lambda: b.process.status().ready)
        ready = await b.http.get("/readyz")
        assert ready.status_code == 200
        assert ready.json() == {"status": "ok", "reasons": [], "text_only": True}
        report = b.process.status()
        assert [stage.name for stage in report.stages] == ["thinker"]
        assert f"model: {report.gateway.model}, text only\n" in describe(report)
        told = (await b.http.get("/metrics")).text
        assert 'omnirelay_stage_up{stage="thinker"} 1.0' in told
        assert 'omnirelay_stage_up{stage="talker"}' not in told
        await fails(client.chat("Hi"), InvalidRequestError, "text-only")
        for path, body in (("/v1/audio/speech", READ), ("/v1/chat/completions", CHAT | SPOKEN)):
            refused = await b.http.post(path, json=body)
            assert refused.status_code == 400
            assert "is text-only" in refused.json()["error"]["message"]
        asked = asyncio.create_task(b.http.post("/v1/chat/completions", json=CHAT))
        await b.stages.answer(await b.stages.request(0), b.encode("Hello"))
        assert (await asked).json()["choices"][0]["message"]["content"] == "Hello"


async def test_a_thinker_that_is_missing_is_still_told(configure: Configure) -> None:
    config = configure(http_gateway()).model_copy(update={"text_only": True})
    async with http_bench(config, ready=False, alive=[]) as b:
        ready = await b.http.get("/readyz")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["the thinker is starting"])
        assert not b.process.status().ready


def test_up_starts_the_thinker_alone(place: Path) -> None:
    with start("omnirelay.cli", "up", "--text-only") as process:
        told = "".join(read_until(process, "ready: tcp://"))
        assert ", text only)" in told
        assert "[talker]" not in told
        with Client(os.environ["OMNIRELAY_GATEWAY__LISTEN"]) as client:
            assert [stage.name for stage in client.status().stages] == ["thinker"]
            assert client.chat("Hi", speech=False).result().done.finish_reason == "stop"
            with pytest.raises(InvalidRequestError, match="text-only"):
                client.chat("Hi").result()
        end(process)


def test_the_doctor_looks_at_what_there_is_to_be() -> None:
    taken = {"talker": {"inbox": "tcp://127.0.0.1:5555"}}
    both = Config.model_validate({"stages": taken})
    alone = Config.model_validate({"stages": taken, "text_only": True})
    assert [each.level for each in network.check_addresses(both)] == ["problem"]
    assert [each.level for each in network.check_addresses(alone)] == ["ok"]
    readings = machine.read_machine()
    told = "; ".join(each.what for each in machine.check_cpus(alone, readings, on_cpu=True))
    assert "thinker" in told
    assert "talker" not in told
