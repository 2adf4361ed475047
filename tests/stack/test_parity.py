"""The whole stack against transformers: greedy, float32, several shapes of checkpoints, several workers."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from checkpoint import RELEASED_VOCABULARY, TINY, CheckpointShape, write_checkpoint
from omnirelay import (
    Answer,
    AudioPart,
    ChatMessage,
    ChatResult,
    Client,
    GenerateRequest,
    ImagePart,
    SamplingOverrides,
    TextPart,
    VideoPart,
)
from omnirelay.content import ContentPart
from shared.messages import MediaKind
from tests.support.answers import Reference
from tests.support.conversations import Processor, examples, to_be_spoken
from tests.support.processes import wait_until
from tests.support.stack import RunningStack, make_config
from tests.support.workers import TWO, check_gone, shared_names, workers_of

TEXT_TOKENS = 24
CODEC_TOKENS = 64
SEED = 11
WAVEFORM_TOLERANCE = 1e-4
LIMITS: Any = {"thinker_max_new_tokens": TEXT_TOKENS, "talker_max_new_tokens": CODEC_TOKENS}
GREEDY_TEXT = SamplingOverrides(max_tokens=TEXT_TOKENS, temperature=0.0)
GREEDY_CODEC = SamplingOverrides(max_tokens=CODEC_TOKENS, temperature=0.0)


def shapes() -> dict[str, CheckpointShape]:
    """Grouped-query attention of three kinds, head sizes and embeddings of their own, two vocabularies."""
    thinker, talker = TINY.thinker, TINY.talker
    return {
        "tiny": TINY,
        "wide heads, one key-value head": dataclasses.replace(
            TINY,
            thinker=thinker | {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3},
            talker=talker
            | {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
        ),
        "released vocabulary": dataclasses.replace(TINY, vocabulary=RELEASED_VOCABULARY),
    }


@dataclasses.dataclass(frozen=True)
class Pair:
    """A stack and its oracle on the same checkpoint."""

    stack: RunningStack
    reference: Reference


SHAPES = [
    pytest.param(name, marks=[] if name == "tiny" else [pytest.mark.long], id=name) for name in shapes()
]


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if request.param == "tiny":
        # The session has one of these.
        yield Pair(request.getfixturevalue("stack"), request.getfixturevalue("reference"))
        return
    directory = tmp_path_factory.mktemp("parity")
    seed = list(shapes()).index(request.param) + 1
    write_checkpoint(directory / "model", shapes()[request.param], seed=seed)
    with RunningStack(make_config(directory / "model"), directory) as stack:
        yield Pair(stack, Reference(directory / "model"))


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to 2,000 ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 2000, 2, 17, 130, 701, 64, 255][:count]
    return [torch.randint(0, 1400, (length,), generator=generator).tolist() for length in lengths]


def request_for(speaker: str, **prompt: Any) -> GenerateRequest:
    return GenerateRequest(
        speaker=speaker,
        streaming=False,
        text_sampling=GREEDY_TEXT,
        codec_sampling=GREEDY_CODEC,
        seed=SEED,
        **prompt,
    )


def ask(client: Client, prompt: list[int], speaker: str) -> Answer:
    return client.chat(request_for(speaker, prompt_token_ids=prompt))


def check(reference: Reference, prompt: list[int], speaker: str, result: ChatResult) -> None:
    expected = reference.answer(prompt, speaker=speaker, **LIMITS)
    assert result.done.text_token_ids == expected.text
    assert result.done.codec_token_ids == expected.codes
    waveform = reference.waveform(expected.codes, speaker=speaker, seed=SEED).numpy()
    assert result.audio.shape == waveform.shape
    assert np.abs(result.audio - waveform).max() < WAVEFORM_TOLERANCE
    assert np.sqrt(np.mean(np.square(result.audio))) > 0.01


def test_eight_different_requests_at_once_each_get_their_own_answer(pair: Pair) -> None:
    asked = [(prompt, ("Ethan", "Chelsie")[index % 2]) for index, prompt in enumerate(prompts(8, seed=2))]
    with Client(pair.stack.address) as client:
        answers = [ask(client, prompt, speaker) for prompt, speaker in asked]
        results = [answer.result() for answer in answers]
    for (prompt, speaker), result in zip(asked, results, strict=True):
        check(pair.reference, prompt, speaker, result)
    assert len({tuple(result.done.codec_token_ids) for result in results}) == len(results)


PARTS: dict[MediaKind, Callable[..., ContentPart]] = {
    "audio": AudioPart,
    "image": ImagePart,
    "video": VideoPart,
}


@pytest.mark.parametrize("name", ["everything, with two videos' sound", "three turns"])
def test_sounds_pictures_and_videos(
    stack: RunningStack, processor: Processor, reference: Reference, name: str
) -> None:
    """Each kind alone is in ``tests/thinker`` and ``tests/talker``."""
    conversation = examples()[name]
    messages = [
        ChatMessage(
            turn.role,
            [
                TextPart(part) if isinstance(part, str) else PARTS[part.kind](data=memoryview(part.data))
                for part in turn.parts
            ],
        )
        for turn in conversation.turns
    ]
    heard = conversation.use_audio_in_video
    request = request_for("Ethan", messages=messages, use_audio_in_video=heard)
    with Client(stack.address) as client:
        done = client.chat(request).result().done
    inputs = processor.inputs(to_be_spoken(conversation))
    (expected,) = reference.answers_to(inputs, use_audio_in_video=heard, **LIMITS)
    assert done.prompt_tokens == len(expected.prompt)
    assert (done.text_token_ids, done.codec_token_ids) == (expected.text, expected.codes)


PARALLEL = {"engine": TWO, "threads": 2}


@pytest.fixture(scope="module")
def parallel(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    config = make_config(tiny_checkpoint, stages={"thinker": PARALLEL, "talker": PARALLEL})
    with RunningStack(config, tmp_path_factory.mktemp("parallel")) as running:
        yield running


def stage_of(stack: RunningStack, name: str) -> psutil.Process:
    """The process of a stage."""
    found = [
        each
        for each in psutil.Process(stack.process.pid).children(recursive=True)
        if f"services.{name}" in each.cmdline()
    ]
    return found[0]


@pytest.mark.long
def test_answers_of_two_workers_a_stage_equal_the_reference(
    parallel: RunningStack, reference: Reference
) -> None:
    asked = prompts(6, seed=1)[2:]
    with Client(parallel.address) as client:
        check(reference, asked[0], "Ethan", ask(client, asked[0], "Ethan").result())
        answers = [ask(client, prompt, "Chelsie") for prompt in asked]
        for prompt, answer in zip(asked, answers, strict=True):
            check(reference, prompt, "Chelsie", answer.result())


@pytest.mark.long
def test_a_stage_ends_with_a_worker_and_workers_with_their_stage(parallel: RunningStack) -> None:
    talker, thinker = stage_of(parallel, "talker"), stage_of(parallel, "thinker")
    below = {each.pid: workers_of(each.pid) for each in (talker, thinker)}
    assert [len(each) for each in below.values()] == [2, 2]
    below[talker.pid][0].kill()
    check_gone([talker, *below[talker.pid]])
    said = "engine_failed: the talker's engine failed"
    wait_until(lambda: any(said in line for line in parallel.output), said)
    thinker.kill()
    check_gone([thinker, *below[thinker.pid]])
    parallel.stop()
    assert shared_names() == set()
