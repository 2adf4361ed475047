"""Top-k and top-p without sorting, against vLLM's own sampler."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor.interface import AddedRequest, MoveDirectionality
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from shared.vllm.sampling.nucleus import MAX_CANDIDATES, NucleusProcessor, use_fast_top_k

VOCABULARY = 300

Request = tuple[int, float]


def processor() -> NucleusProcessor:
    return NucleusProcessor(None, torch.device("cpu"), False)


def params(top_k: int, top_p: float, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)


def update(size: int, added: dict[int, SamplingParams], removed=(), moved=()) -> BatchUpdate:
    rows: list[AddedRequest] = [(index, use_fast_top_k(asked), None, []) for index, asked in added.items()]
    return BatchUpdate(batch_size=size, added=rows, removed=list(removed), moved=list(moved))


def random_logits(rows: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    # Distinct values: what is kept of equal ones is a matter of order.
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(rows)])
    return scale * torch.special.ndtri((ranks + 0.5) / VOCABULARY).float()


def expected(logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    top_k = torch.tensor([k or VOCABULARY for k, _ in requests])
    top_p = torch.tensor([p for _, p in requests])
    return apply_top_k_top_p_pytorch(logits.clone(), top_k.clamp(max=VOCABULARY), top_p)


requests_of_a_batch = st.lists(
    st.tuples(st.integers(1, VOCABULARY + 50), st.floats(0.01, 0.99)), min_size=1, max_size=6
)


@settings(deadline=None, max_examples=150)
@given(requests=requests_of_a_batch, seed=st.integers(0, 2**16), scale=st.sampled_from([0.1, 1.0, 5.0]))
def test_keeps_what_vllm_s_sampler_keeps(requests, seed, scale):
    nucleus, logits = processor(), random_logits(len(requests), seed, scale)
    wanted = expected(logits, requests)
    nucleus.update_state(update(len(requests), {i: params(k, p) for i, (k, p) in enumerate(requests)}))
    kept = nucleus.apply(logits.clone())
    differing = (torch.isfinite(kept) != torch.isfinite(wanted)).sum(dim=-1)
    # Sums of rounded probabilities may fall on either side of p: at most the last token of a nucleus differs.
    assert differing.max() <= 1
    assert torch.equal(kept[torch.isfinite(kept)], logits[torch.isfinite(kept)])


def test_equal_logits_are_kept_together():
    nucleus = processor()
    nucleus.update_state(update(1, {0: params(2, 0.99)}))
    assert nucleus.apply(torch.tensor([[1.0, 5.0, 1.0, 0.0]])).tolist() == [[1.0, 5.0, 1.0, -torch.inf]]


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"),
    [(0, 0.8, 1.0), (40, 1.0, 1.0), (40, 0.8, 0.0), (MAX_CANDIDATES + 1, 0.8, 1.0)],
)
def test_other_requests_stay_with_vllm(top_k, top_p, temperature):
    asked = use_fast_top_k(params(top_k, top_p, temperature))
    assert asked == params(top_k, top_p, temperature)
    nucleus, logits = processor(), random_logits(1, 1)
    nucleus.update_state(update(1, {0: asked}))
    assert torch.equal(nucleus.apply(logits.clone()), logits)


def test_follows_requests_that_join_leave_and_move():
    nucleus, logits = processor(), random_logits(4, 2)
    batch: dict[int, Request] = {0: (5, 0.5), 2: (9, 0.9)}

    def check() -> None:
        kept = torch.isfinite(nucleus.apply(logits.clone()))
        for row in range(4):
            wanted = expected(logits[row : row + 1], [batch.get(row, (0, 1.0))])
            assert torch.equal(kept[row : row + 1], torch.isfinite(wanted)), row

    nucleus.update_state(update(4, {row: params(*request) for row, request in batch.items()}))
    check()
    nucleus.update_state(None)
    check()
    nucleus.update_state(update(4, {}, moved=[(0, 1, MoveDirectionality.UNIDIRECTIONAL)]))
    batch[1] = batch.pop(0)
    check()
    nucleus.update_state(update(4, {}, moved=[(1, 2, MoveDirectionality.SWAP)]))
    batch[1], batch[2] = batch[2], batch[1]
    check()
    nucleus.update_state(update(4, {2: params(0, 1.0), 3: params(3, 0.2)}, removed=[1]))
    batch = {3: (3, 0.2)}
    check()
    nucleus.update_state(update(4, {}, removed=[3]))
    batch = {}
    check()


def test_follows_a_batch_that_others_join_and_leave():
    """Where all requests are narrowed their rows are not picked out, and must be as soon as one is not."""
    nucleus, logits = processor(), random_logits(3, 4)
    nucleus.update_state(update(2, {0: params(5, 0.5), 1: params(9, 0.9)}))
    narrowed = expected(logits[:2], [(5, 0.5), (9, 0.9)])
    assert torch.equal(nucleus.apply(logits[:2].clone()), narrowed)
    nucleus.update_state(update(3, {2: params(0, 1.0)}))
    assert torch.equal(nucleus.apply(logits.clone()), torch.cat([narrowed, logits[2:]]))
    nucleus.update_state(update(2, {}, removed=[2]))
    assert torch.equal(nucleus.apply(logits[:2].clone()), narrowed)
