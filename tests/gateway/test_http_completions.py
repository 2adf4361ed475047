"""/v1/completions: OpenAI's client, and prompts that are wrong."""

import json
from typing import Any

import openai
import pytest

from gateway.http.openai.completions import read_completion
from gateway.http.openai.strings import parse
from omnirelay.errors import InvalidRequestError
from tests.gateway.http_bench import MODEL, HttpBench, speaking

ANSWER = "upon a time"


async def test_a_text_is_continued(web: HttpBench) -> None:
    async with speaking(web, ANSWER, []):
        create = web.ai.completions.create
        ids = web.encode("Once <|im")
        for prompt in ("Once <|im", ["Once <|im"], ids, [ids]):
            whole: Any = await create(model=MODEL, prompt=prompt)
            [choice] = whole.choices
            assert (choice.text, choice.finish_reason) == (ANSWER, "stop")
            assert whole.usage.completion_tokens == len(web.encode(ANSWER))
            assert web.stages.requests[-1].prompt_token_ids == ids
            assert web.stages.requests[-1].sampling.max_tokens == 16
        await create(model=MODEL, prompt="<|im_end|>", max_tokens=5)
        assert len(web.stages.requests[-1].prompt_token_ids) > 1
        assert web.stages.requests[-1].sampling.max_tokens == 5
        options: Any = {"include_usage": True}
        # Its models do not know that only the last chunk has a finish reason, as in OpenAI's own streams.
        lenient = web.ai.with_options(_extra_kwargs={"_strict_response_validation": False})
        stream: Any = await lenient.completions.create(
            model=MODEL, prompt="Once", stream=True, stream_options=options
        )
        chunks: list[Any] = [chunk async for chunk in stream]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == ANSWER
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == len(web.encode(ANSWER))
        for wrong in ("", [10**6]):
            with pytest.raises(openai.BadRequestError) as raised:
                await create(model=MODEL, prompt=wrong)
            assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt[0]"),
        ({"prompt": [1, 2.5]}, "prompt[1]"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "mood": "good"}, "mood"),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read_completion(parse(bytearray(json.dumps({"model": "m", **fields}).encode()), 1000), 100)
    assert raised.value.param == param
