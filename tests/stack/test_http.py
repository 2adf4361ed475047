"""OpenAI's client, and vLLM's benchmark, against the whole stack."""

import argparse
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from gateway.http.encoding.encoders import to_int16
from omnirelay import Client, GenerateRequest, SamplingOverrides
from omnirelay.content import ChatMessage
from tests.gateway.http_bench import decoded, from_base64
from tests.support.media import picture, spoken
from tests.support.stack import RunningStack

TEXT = "Hello! Who are you?"
HI: list[Any] = [{"role": "user", "content": TEXT}]
HOW: Any = {
    "model": "omnirelay",
    "seed": 5,
    "max_tokens": 12,
    "extra_body": {"codec_sampling": {"max_tokens": 60, "min_tokens": 60}, "chunk_frames": [12, 24]},
}
SPOKEN: Any = {**HOW, "modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}}
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def url(stack: RunningStack) -> str:
    address: str = stack.config["gateway"]["http"]
    return address.replace("tcp:", "http:")


@pytest.fixture(scope="module")
def ai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def data_url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"


def test_the_answer_is_that_of_the_other_protocol(stack: RunningStack, ai: openai.OpenAI) -> None:
    request = GenerateRequest(
        messages=[ChatMessage("user", TEXT)],
        speaker="Ethan",
        seed=5,
        chunk_frames=[12, 24],
        text_sampling=SamplingOverrides(max_tokens=12),
        codec_sampling=SamplingOverrides(max_tokens=60, min_tokens=60),
    )
    with Client(stack.address) as client:
        expected = client.chat(request).result()
    pcm = to_int16(expected.audio.tobytes())
    answer = ai.chat.completions.create(messages=HI, **SPOKEN)
    audio = answer.choices[0].message.audio
    assert audio is not None
    assert audio.transcript == expected.text
    assert np.array_equal(np.frombuffer(base64.b64decode(audio.data), "<i2"), pcm)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.done.prompt_tokens
    assert answer.usage.completion_tokens == len(expected.done.text_token_ids) + 60
    deltas = [
        getattr(chunk.choices[0].delta, "audio", None)
        for chunk in ai.chat.completions.create(messages=HI, stream=True, **SPOKEN)
    ]
    said = [delta for delta in deltas if delta is not None]
    assert "".join(delta.transcript or "" for delta in said) == expected.text
    pieces = [delta.data for delta in said if delta.data]
    assert len(pieces) > 1
    assert np.array_equal(np.frombuffer(from_base64(pieces), "<i2"), pcm)
    # Without speech the chat template's own system message stands before it.
    with Client(stack.address) as client:
        written = client.chat(msgspec.structs.replace(request, speech=False)).result()
    plain = ai.chat.completions.create(messages=HI, **HOW)
    assert plain.choices[0].message.content == written.text


def test_each_choice_is_the_answer_to_its_seed(ai: openai.OpenAI) -> None:
    how: Any = {"model": "omnirelay", "messages": HI, "max_tokens": 8, "temperature": 1.5}
    whole = ai.chat.completions.create(n=3, seed=5, **how)
    alone = [ai.chat.completions.create(seed=seed, **how) for seed in (5, 6, 7)]
    texts = [each.choices[0].message.content for each in alone]
    assert [choice.message.content for choice in whole.choices] == texts
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in ai.chat.completions.create(n=3, seed=5, stream=True, **how):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_sounds_and_pictures_in_and_speech_out(ai: openai.OpenAI) -> None:
    content: Any = [
        {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(spoken()).decode(), "format": "wav"},
        },
        {"type": "image_url", "image_url": {"url": data_url(picture())}},
        {"type": "text", "text": "What do you hear and see?"},
    ]
    how = {**SPOKEN, "audio": {"voice": "Chelsie", "format": "flac"}}
    answer = ai.chat.completions.create(messages=[{"role": "user", "content": content}], **how)
    audio = answer.choices[0].message.audio
    assert audio is not None
    assert decoded(base64.b64decode(audio.data), "flac").size == 60 * 480
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 100


def test_a_text_is_spoken(ai: openai.OpenAI) -> None:
    with ai.audio.speech.with_streaming_response.create(
        model="omnirelay", input="Good morning.", voice="Chelsie", response_format="wav"
    ) as response:
        speech = b"".join(response.iter_bytes())
    assert decoded(speech, "wav").size > 0


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai-chat", "/v1/chat/completions"), ("openai-responses", "/v1/responses")]
)
def test_vllms_benchmark_drives_it(
    url: str, tiny_checkpoint: Path, tmp_path: Path, backend: str, endpoint: str
) -> None:
    """As ``vllm bench serve`` does."""
    from vllm.benchmarks import serve  # noqa: PLC0415 - loads vLLM

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    result = tmp_path / "result.json"
    options = {
        "backend": backend,
        "base-url": url,
        "endpoint": endpoint,
        "model": "omnirelay",
        "tokenizer": tiny_checkpoint,
        "dataset-name": "random",
        "random-input-len": 16,
        "random-output-len": 8,
        "num-prompts": 6,
        "max-concurrency": 3,
        "temperature": 0,
        "result-filename": result,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    serve.main(parser.parse_args([*words, "--ignore-eos", "--save-result", "--disable-tqdm"]))
    told = json.loads(result.read_text())
    assert (told["completed"], told["total_output_tokens"]) == (6, 6 * 8)
    assert told["median_ttft_ms"] > 0
