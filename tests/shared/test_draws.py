"""Seeded draws: each a function of the seed and its number, and together as likely as they should be."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from shared.messages import STAGES, Sampling, StageName
from shared.vllm.sampling.generation import sampling_params
from shared.vllm.sampling.generators import go_on_drawing, mix, seed_of_draw
from shared.vllm.worker import _seed_generators

Sampler = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
CPU: Sampler = TopKTopPSampler().forward_cpu
"""How vLLM draws on a CPU: a random number is the seed of the token's noise."""
GPU: Sampler = TopKTopPSampler().forward_native
"""How it draws on a GPU for requests with a seed: the noise of every token is a random number."""

seeds = st.integers(0, 2**63 - 1)
counts = st.integers(0, 2**31)


def params(seed: int, made: int = 0, stage: StageName = "thinker") -> SamplingParams:
    return go_on_drawing(SamplingParams(seed=seed, temperature=1.0), stage, made)


@given(seed=seeds, made=counts, drawn=counts)
def test_a_draw_has_the_number_that_it_has_in_all(seed: int, made: int, drawn: int) -> None:
    seed_of = seed_of_draw(params(seed, made), drawn)
    assert seed_of == seed_of_draw(params(seed), made + drawn)
    assert 0 <= seed_of < 2**64


def test_splitmix64_is_the_published_one() -> None:
    """First numbers of the generator with seed 1234567, from its reference implementation."""
    golden = 0x9E3779B97F4A7C15
    assert [mix(1234567 + number * golden) for number in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_no_two_draws_of_neighbouring_seeds_are_alike() -> None:
    drawn = {
        seed_of_draw(params(seed, stage=stage), number)
        for stage in STAGES
        for seed in range(100)
        for number in range(100)
    }
    # The CPU's generator looks at 32 bits; of 30,000 random ones, 0.1 pairs are equal.
    assert len({seed % 2**32 for seed in drawn}) == 3 * 100 * 100


class Batch:
    """The part of vLLM's runner that tells which requests draw."""

    def __init__(self, requests: list[SamplingParams]) -> None:
        names = [str(index) for index in range(len(requests))]
        self.output: list[list[int]] = [[] for _ in requests]
        self.input_batch = SimpleNamespace(
            generators={index: torch.Generator() for index in range(len(requests))},
            num_reqs=len(requests),
            req_ids=names,
            req_output_token_ids=self.output,
        )
        self.requests = {
            name: SimpleNamespace(sampling_params=each) for name, each in zip(names, requests, strict=True)
        }
        self.discard_request_mask = SimpleNamespace(np=np.zeros(len(requests), dtype=bool))

    def draw(self, sampler: Sampler, logits: torch.Tensor) -> list[int]:
        assert _seed_generators(self) == {}
        tokens, _ = sampler(logits.clone(), self.input_batch.generators, None, None)
        for output, token in zip(self.output, tokens.tolist(), strict=True):
            output.append(token)
        return list(map(int, tokens))


@pytest.mark.parametrize("sampler", [CPU, GPU], ids=["a CPU", "a GPU"])
@settings(deadline=None, max_examples=20)
@given(seed=seeds, cut=st.integers(0, 9))
def test_who_resumes_draws_the_same(sampler: Sampler, seed: int, cut: int) -> None:
    logits = torch.randn(10, 50, generator=torch.Generator().manual_seed(1))
    whole, resumed = Batch([params(seed)]), Batch([params(seed, cut)])
    tokens = [whole.draw(sampler, row) for row in logits[:, None]]
    assert [resumed.draw(sampler, row) for row in logits[cut:, None]] == tokens[cut:]


def test_a_draw_that_is_thrown_away_is_not_one() -> None:
    batch = Batch([params(1), params(2)])
    batch.discard_request_mask.np[0] = True
    thrown, state = batch.input_batch.generators[0], batch.input_batch.generators[0].get_state()
    assert _seed_generators(batch) == {0: thrown}
    assert list(batch.input_batch.generators) == [1]
    assert torch.equal(thrown.get_state(), state)


def chi_square(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * observed.sum()
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("sampler", [CPU, GPU], ids=["a CPU", "a GPU"])
@pytest.mark.parametrize("fixed", ["the seed", "the number"])
def test_tokens_are_as_likely_as_the_logits_say(sampler: Sampler, fixed: str) -> None:
    """Along one request, and over the first draws of many.

    With 29 degrees of freedom a right one exceeds 66 once in ten thousand times.
    """
    draws, vocabulary = 20_000, 30
    logits = 1.5 * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(3))
    counted = torch.zeros(vocabulary, dtype=torch.float64)
    if fixed == "the seed":
        batch = Batch([params(11)])
        for _ in range(draws):
            counted[batch.draw(sampler, logits)] += 1
    else:
        for first in range(0, draws, 500):
            batch = Batch([params(seed) for seed in range(first, first + 500)])
            counted += torch.bincount(
                torch.tensor(batch.draw(sampler, logits.expand(500, -1))), minlength=vocabulary
            )
    assert chi_square(counted, logits[0].double().softmax(dim=0)) < 66


def test_draws_that_follow_one_another_are_independent() -> None:
    """Pairs of ten equally likely tokens: 99 degrees of freedom, above 161 once in ten thousand times."""
    batch = Batch([params(5)])
    tokens = [batch.draw(CPU, torch.zeros(1, 10))[0] for _ in range(20_001)]
    pairs = torch.tensor([10 * one + other for one, other in itertools.pairwise(tokens)])
    assert chi_square(torch.bincount(pairs, minlength=100).double(), torch.full((100,), 0.01)) < 161


@pytest.mark.parametrize("sampler", [CPU, GPU], ids=["a CPU", "a GPU"])
@pytest.mark.parametrize("lag", [-1, 0, 1])
def test_the_stages_of_a_request_draw_independently(sampler: Sampler, lag: int) -> None:
    """Pairs of a text and a codec token with the same logits, as in the test above."""
    tokens = {}
    for stage in STAGES[:2]:
        batch = Batch([params(seed, stage=stage) for seed in range(400)])
        tokens[stage] = torch.tensor([batch.draw(sampler, torch.zeros(400, 10)) for _ in range(30)])
    text, codec = tokens["thinker"][1:-1], tokens["talker"][1 + lag : 29 + lag]
    pairs = torch.bincount((10 * text + codec).flatten(), minlength=100)
    assert chi_square(pairs.double(), torch.full((100,), 0.01)) < 161


@pytest.mark.parametrize(
    ("made", "room", "most", "least"), [(0, 100, 40, 10), (7, 100, 33, 3), (12, 100, 28, 0), (12, 20, 8, 0)]
)
def test_what_was_drawn_counts(made: int, room: int, most: int, least: int) -> None:
    asked: dict[str, Any] = {"seed": 1, "stage": "talker", "stop_token_ids": [3], "room": room, "made": made}
    made_of = sampling_params(Sampling(max_tokens=40, min_tokens=10), **asked)
    assert (made_of.max_tokens, made_of.min_tokens) == (most, least)
