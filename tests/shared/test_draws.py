"""Seeded draws: each a function of the seed and its number, and together as likely as they should be."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams

from shared.messages import STAGES, Sampling, StageName
from shared.vllm.sampling.drawing import gumbel_noise
from shared.vllm.sampling.generation import sampling_params
from shared.vllm.sampling.seeds import mix, seed_of_draw
from tests.support.drawing import Batch, params_of

seeds = st.integers(0, 2**63 - 1)
counts = st.integers(0, 2**31)


def params(seed: int, made: int = 0, stage: StageName = "thinker") -> SamplingParams:
    return params_of(seed=seed, made=made, stage=stage)


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


@settings(deadline=None, max_examples=20)
@given(seed=seeds, cut=st.integers(0, 9))
def test_who_resumes_draws_the_same(seed: int, cut: int) -> None:
    logits = torch.randn(10, 50, generator=torch.Generator().manual_seed(1))
    whole, resumed = Batch([params(seed)]), Batch([params(seed, cut)])
    tokens = [whole.draw(row) for row in logits[:, None]]
    assert [resumed.draw(row) for row in logits[cut:, None]] == tokens[cut:]


def test_a_draw_that_is_thrown_away_is_not_one() -> None:
    """As vLLM does between the pieces of a prompt."""
    batch, logits = Batch([params(1)]), torch.zeros(1, 1000)
    thrown = batch.draw(logits, keep=False)
    assert batch.draw(logits) == thrown
    assert batch.draw(logits) != thrown


@given(seed=st.integers(0, 2**64 - 1), ids=st.lists(st.integers(0, 2**20), min_size=1, max_size=5))
def test_noise_is_splitmix64_of_seed_and_token(seed: int, ids: list[int]) -> None:
    signed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
    words = [mix(seed + each * 0x9E3779B97F4A7C15) >> 1 for each in ids]
    expected = -torch.log(-torch.log1p(-torch.tensor(words, dtype=torch.float64) / 2.0**63))
    found = gumbel_noise(signed, torch.tensor(ids))
    assert found.dtype == torch.float32
    assert torch.allclose(found[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_noise_is_finite_from_above_where_all_bits_are_zero() -> None:
    """A token whose noise were infinite would be drawn however unlikely it is."""
    # The word whose mixture is 0, before the first id is added.
    seed = torch.tensor([2**64 - 0x9E3779B97F4A7C15])
    assert mix(int(seed)) == 0
    assert 60 < float(gumbel_noise(seed, torch.tensor([0]))) < 80


def test_noise_is_finite_from_below_where_all_bits_are_one() -> None:
    """A token whose noise were infinite would not be drawn, if it is the only one that a grammar allows."""
    # The word whose mixture has only ones, before the first id is added.
    seed = torch.tensor([0xCF9A04AFFA6BADC0 - 0x9E3779B97F4A7C15])
    assert mix(int(seed)) == 2**64 - 1
    assert -3 < float(gumbel_noise(seed, torch.tensor([0]))) < -2.8


def chi_square(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * observed.sum()
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("fixed", ["the seed", "the number"])
def test_tokens_are_as_likely_as_the_logits_say(fixed: str) -> None:
    """Along one request, and over the first draws of many.

    With 29 degrees of freedom a right one exceeds 66 once in ten thousand times.
    """
    draws, vocabulary = 20_000, 30
    logits = 1.5 * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(3))
    counted = torch.zeros(vocabulary, dtype=torch.float64)
    if fixed == "the seed":
        batch = Batch([params(11)])
        for _ in range(draws):
            counted[batch.draw(logits)] += 1
    else:
        for first in range(0, draws, 500):
            batch = Batch([params(seed) for seed in range(first, first + 500)])
            counted += torch.bincount(torch.tensor(batch.draw(logits.expand(500, -1))), minlength=vocabulary)
    assert chi_square(counted, logits[0].double().softmax(dim=0)) < 66


def test_draws_that_follow_one_another_are_independent() -> None:
    """Pairs of ten equally likely tokens: 99 degrees of freedom, above 161 once in ten thousand times."""
    batch = Batch([params(5)])
    tokens = [batch.draw(torch.zeros(1, 10))[0] for _ in range(20_001)]
    pairs = torch.tensor([10 * one + other for one, other in itertools.pairwise(tokens)])
    assert chi_square(torch.bincount(pairs, minlength=100).double(), torch.full((100,), 0.01)) < 161


@pytest.mark.parametrize("lag", [-1, 0, 1])
def test_the_stages_of_a_request_draw_independently(lag: int) -> None:
    """Pairs of a text and a codec token with the same logits, as in the test above."""
    tokens = {}
    for stage in STAGES[:2]:
        batch = Batch([params(seed, stage=stage) for seed in range(400)])
        tokens[stage] = torch.tensor([batch.draw(torch.zeros(400, 10)) for _ in range(30)])
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
