"""The whole stack against transformers: greedy, float32, three checkpoints of different shapes."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from checkpoint import RELEASED_VOCABULARY, TINY, CheckpointShape, write_checkpoint
from omnirelay import ChatResult, Client, GenerateRequest, SamplingOverrides
from tests.support.answers import Reference
from tests.support.stack import RunningStack, make_config

TEXT_TOKENS = 24
CODEC_TOKENS = 64
SEED = 11
WAVEFORM_TOLERANCE = 1e-4
GREEDY_TEXT = SamplingOverrides(max_tokens=TEXT_TOKENS, temperature=0.0)
GREEDY_CODEC = SamplingOverrides(max_tokens=CODEC_TOKENS, temperature=0.0)


def shapes() -> dict[str, CheckpointShape]:
    """Grouped-query attention of three kinds, head sizes and embeddings of their own, two vocabularies."""
    thinker, talker = TINY.thinker, TINY.talker
    return {
        "tiny": TINY,
        "wide heads, one key-value head": dataclasses.replace(
            TINY,
            thinker=dataclasses.replace(thinker, hidden_size=192, heads=6, key_value_heads=3),
            talker=dataclasses.replace(talker, hidden_size=160, heads=2, key_value_heads=1, head_dim=64),
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


def request_for(prompt: list[int], speaker: str, streaming: bool = False) -> GenerateRequest:
    return GenerateRequest(
        prompt_token_ids=prompt,
        speaker=speaker,
        streaming=streaming,
        text_sampling=GREEDY_TEXT,
        codec_sampling=GREEDY_CODEC,
        seed=SEED,
    )


def check(reference: Reference, prompt: list[int], speaker: str, result: ChatResult) -> None:
    expected = reference.answer(
        prompt, speaker=speaker, thinker_max_new_tokens=TEXT_TOKENS, talker_max_new_tokens=CODEC_TOKENS
    )
    assert result.done.text_token_ids == expected.text
    assert result.done.codec_token_ids == expected.codes
    waveform = reference.waveform(expected.codes, speaker=speaker, seed=SEED).numpy()
    assert result.audio.shape == waveform.shape
    assert np.abs(result.audio - waveform).max() < WAVEFORM_TOLERANCE
    assert np.sqrt(np.mean(np.square(result.audio))) > 0.01


@pytest.mark.parametrize("speaker", ["Chelsie", "Ethan"])
def test_requests_alone_equal_the_reference(pair: Pair, speaker: str) -> None:
    with Client(pair.stack.address) as client:
        for prompt in prompts(4, seed=1):
            check(pair.reference, prompt, speaker, client.chat(request_for(prompt, speaker)).result())


def test_eight_different_requests_at_once_each_get_their_own_answer(pair: Pair) -> None:
    asked = [(prompt, ("Ethan", "Chelsie")[index % 2]) for index, prompt in enumerate(prompts(8, seed=2))]
    with Client(pair.stack.address) as client:
        answers = [client.chat(request_for(prompt, speaker)) for prompt, speaker in asked]
        results = [answer.result() for answer in answers]
    for (prompt, speaker), result in zip(asked, results, strict=True):
        check(pair.reference, prompt, speaker, result)
    assert len({tuple(result.done.codec_token_ids) for result in results}) == len(results)


def test_a_streamed_answer_has_the_same_tokens_and_length(pair: Pair) -> None:
    prompt = prompts(5, seed=4)[4]
    with Client(pair.stack.address) as client:
        whole = client.chat(request_for(prompt, "Ethan")).result()
        streamed = client.chat(request_for(prompt, "Ethan", streaming=True)).result()
    assert streamed.done.text_token_ids == whole.done.text_token_ids
    assert streamed.done.codec_token_ids == whole.done.codec_token_ids
    assert streamed.audio.shape == whole.audio.shape
    # The look-ahead approximates, but it is the same speech.
    assert np.corrcoef(streamed.audio, whole.audio)[0, 1] > 0.99
