"""Seeded draws of whole batches, against vLLM's own filter and the probabilities it leaves."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import SamplingType
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor.interface import AddedRequest, MoveDirectionality
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from shared.messages import STAGES, Sampling, StageName
from shared.vllm.sampling.drawing import MAX_CANDIDATES, gumbel_noise
from shared.vllm.sampling.generation import sampling_params
from shared.vllm.sampling.seeds import mix, seed_of_draw
from tests.support.steps import Batch, Recorder, params_of, processor

VOCABULARY = 300
# What OpenAI's clients send, the talker's defaults, and what only experiments have.
KINDS: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.8}, {"top_k": 5}]

Request = tuple[int, float]


def update(size: int, added: dict[int, SamplingParams], removed=(), moved=()) -> BatchUpdate:
    rows: list[AddedRequest] = [(index, asked, None, []) for index, asked in added.items()]
    return BatchUpdate(batch_size=size, added=rows, removed=list(removed), moved=list(moved))


def random_logits(rows: int, seed: int, scale: float = 3.0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    # Distinct values: what is kept of equal ones is a matter of order.
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(rows)])
    return scale * torch.special.ndtri((ranks + 0.5) / vocabulary).float()


def filtered(logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """By vLLM's own sampler."""
    top_k = torch.tensor([k or logits.shape[1] for k, _ in requests])
    top_p = torch.tensor([p for _, p in requests])
    return apply_top_k_top_p_pytorch(logits.clone(), top_k.clamp(max=logits.shape[1]), top_p)


def kept_of(request: Request, logits: torch.Tensor) -> torch.Tensor:
    """Bool ``[vocabulary]``: tokens that can be drawn."""
    nucleus = processor()
    nucleus.update_state(update(1, {0: params_of(top_k=request[0], top_p=request[1])}))
    if not (group := nucleus._groups[0])._most:
        return torch.ones(logits.shape[0], dtype=torch.bool)
    candidates, ids = group.candidates(logits[None].clone())
    kept = torch.zeros(logits.shape[0], dtype=torch.bool)
    kept[ids[torch.isfinite(candidates)]] = True
    return kept


@settings(deadline=None, max_examples=150)
@given(
    request=st.tuples(st.integers(0, VOCABULARY + 50), st.floats(0.01, 1.0)),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
)
@example(request=(0, 0.9999999999999999), seed=0, scale=5.0)
def test_keeps_what_vllm_s_sampler_keeps(request, seed, scale):
    logits = random_logits(1, seed, scale)
    kept = kept_of(request, logits[0])
    # Sums of rounded probabilities may fall on either side of p: at most the last token of a nucleus differs.
    assert (kept != torch.isfinite(filtered(logits, [request]))[0]).sum() <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "min_p"), [(0.7, 0.0), (1.5, 0.02), (0.7, 0.5), (1.0, 1.0)])
def test_temperature_and_min_p_come_first_as_with_vllm(kind, temperature, min_p):
    logits = random_logits(3, 4)
    nucleus = processor()
    # Beside others that have none.
    asked = [params_of(temperature=temperature, min_p=each, **kind) for each in (0.0, min_p, min_p / 2)]
    nucleus.update_state(update(3, dict(enumerate(asked))))
    values, ids = nucleus._groups[0].candidates(logits.clone())
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    kept.scatter_(1, ids.expand_as(values), torch.isfinite(values))
    scaled = logits / temperature
    likely = scaled.softmax(-1)
    least = likely.amax(-1, keepdim=True) * torch.tensor([[0.0], [min_p], [min_p / 2]])
    scaled = scaled.masked_fill(likely < least, -torch.inf)
    expected = torch.isfinite(filtered(scaled, [(int(kind.get("top_k", 0)), kind.get("top_p", 1.0))] * 3))
    assert torch.equal(kept, expected)
    assert len(set(kept.sum(1).tolist())) > 1 or min_p < 0.5
    found = values.gather(1, values.argmax(1, keepdim=True))
    assert torch.allclose(found, scaled.amax(1, keepdim=True))


def test_to_vllm_a_request_that_draws_is_greedy():
    """It would make noise for the whole vocabulary else, to draw from the one token that is left."""
    asked = params_of(temperature=0.7, top_k=5, top_p=0.8, min_p=0.1)
    assert asked.sampling_type is SamplingType.GREEDY
    assert (asked.top_k, asked.top_p, asked.min_p) == (0, 1.0, 0.0)
    assert not processor().is_argmax_invariant()


def test_equal_logits_are_kept_together():
    assert kept_of((2, 0.99), torch.tensor([1.0, 5.0, 1.0, 0.0])).tolist() == [True, True, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_as_likely_as_the_filtered_logits_say(kind):
    """With 11 degrees of freedom a right one exceeds 37 once in ten thousand times."""
    draws, logits = 20_000, random_logits(1, 5, 1.5, vocabulary=12)
    drawn = Batch([params_of(seed=seed, **kind) for seed in range(draws)]).draw(logits.expand(draws, -1))
    counted = torch.bincount(torch.tensor(drawn), minlength=12).double()
    request = int(kind.get("top_k", 0)), kind.get("top_p", 1.0)
    expected = filtered(logits, [request])[0].double().softmax(0) * draws
    assert counted[expected == 0].sum() == 0
    likely = expected > 0
    assert ((counted - expected)[likely] ** 2 / expected[likely]).sum() < 37


def test_a_rare_token_is_as_rare_as_it_should_be():
    """Noise of few bits has a largest number, which too many tokens would get, or none of the rare ones."""
    logits = torch.full((1, 50_000), -16.0)
    logits[0, 7] = 0.0
    share = float(logits.double().softmax(1)[0, 7])
    draws = 2_000
    drawn = [Batch([params_of(seed=seed)]).draw(logits)[0] for seed in range(draws)]
    others = sum(token != 7 for token in drawn)
    assert 0 < others < (1 - share) * draws + 5 * ((1 - share) * draws) ** 0.5
    assert len(set(drawn)) == others + 1


@pytest.mark.parametrize("size", [2, 5])
def test_a_draw_does_not_depend_on_the_batch(size):
    requests = [params_of(seed=number, **KINDS[number % 4]) for number in range(size)]
    requests[0] = params_of(seed=0, top_k=MAX_CANDIDATES + 1, top_p=0.9)
    logits = random_logits(size, 3, vocabulary=2 * MAX_CANDIDATES)
    # As bfloat16 has them: many are equal.
    logits = logits.bfloat16().float()
    batch, alone = Batch(requests), [Batch([each]) for each in requests]
    for _ in range(20):
        assert batch.draw(logits) == [
            each.draw(row[None])[0] for each, row in zip(alone, logits, strict=True)
        ]


def test_greedy_requests_stay_with_vllm():
    nucleus, logits = processor(), random_logits(1, 1)
    asked = params_of(top_k=40, top_p=0.8, temperature=0.0)
    nucleus.update_state(update(1, {0: asked}))
    assert torch.equal(nucleus.apply(logits.clone()), logits)


def test_follows_requests_that_join_leave_and_move():
    nucleus, logits = processor(), random_logits(4, 2)
    batch: dict[int, SamplingParams] = {0: params_of(seed=5, top_k=5), 2: params_of(seed=9)}

    def check(rows: int = 4) -> None:
        left = nucleus.apply(logits[:rows].clone())
        for row in range(rows):
            alone = processor()
            alone.update_state(update(1, {0: batch[row]} if row in batch else {}))
            assert torch.equal(left[row : row + 1], alone.apply(logits[row : row + 1].clone())), row

    nucleus.update_state(update(4, batch))
    check()
    nucleus.update_state(None)
    check()
    nucleus.update_state(update(4, {}, moved=[(0, 1, MoveDirectionality.UNIDIRECTIONAL)]))
    batch[1] = batch.pop(0)
    check()
    nucleus.update_state(update(4, {}, moved=[(1, 2, MoveDirectionality.SWAP)]))
    batch[1], batch[2] = batch[2], batch[1]
    check()
    greedy, other = params_of(temperature=0.0), params_of(seed=3, top_p=0.2)
    nucleus.update_state(update(4, {2: greedy, 3: other}, removed=[1]))
    batch = {3: other}
    check()
    nucleus.update_state(update(4, {0: batch[3]}, removed=[3]))
    # One request, and one row: rows are not picked.
    nucleus.update_state(update(1, {}))
    batch = {0: other}
    check(1)
    nucleus.update_state(update(1, {}, removed=[0]))
    batch = {}
    check(1)


def test_the_kernels_of_a_draw_do_not_become_more_with_the_requests():
    counts = []
    for size in (1, 64):
        made = processor()
        made.update_state(update(size, {row: params_of(seed=row, **KINDS[2]) for row in range(size)}))
        logits, seeds = random_logits(size, 1), torch.arange(size)
        with Recorder() as recorder:
            made._groups[0].draw(logits, seeds)
        counts.append(len(recorder.calls))
    assert counts[0] == counts[1] < 60


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


@pytest.mark.parametrize(
    ("word", "mixture", "least", "most"), [(0, 0, 60, 80), (0xCF9A04AFFA6BADC0, 2**64 - 1, -3, -2.8)]
)
def test_noise_is_finite_where_all_bits_are_equal(word: int, mixture: int, least: float, most: float) -> None:
    """A token of infinite noise would be drawn however unlikely, or not where no other is allowed."""
    # The word that is mixed, before the first id is added.
    seed = torch.tensor([(word - 0x9E3779B97F4A7C15) % 2**64])
    assert mix(int(seed)) == mixture
    assert least < float(gumbel_noise(seed, torch.tensor([0]))) < most


def chi_square(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * observed.sum()
    return float(((observed - expected) ** 2 / expected).sum())


def test_draws_that_follow_one_another_are_as_likely_as_the_logits_say_and_independent() -> None:
    """With 99 degrees of freedom a right one exceeds 161 once in ten thousand times, with 9 it exceeds 34.

    The first draws of many requests are counted above.
    """
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(3))
    likely = logits[0].double().softmax(dim=0)
    batch = Batch([params(5)])
    tokens = [batch.draw(logits)[0] for _ in range(20_001)]
    assert chi_square(torch.bincount(torch.tensor(tokens), minlength=10).double(), likely) < 34
    pairs = torch.tensor([10 * one + other for one, other in itertools.pairwise(tokens)])
    assert (
        chi_square(torch.bincount(pairs, minlength=100).double(), torch.outer(likely, likely).flatten()) < 161
    )


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
