"""The repetition penalty on tokens seen, against transformers' and vLLM's on the whole vocabulary."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor.interface import AddedRequest, MoveDirectionality
from vllm.v1.sample.ops.penalties import apply_all_penalties

from shared.vllm.sampling.repetition import RepetitionProcessor, penalize_here

VOCABULARY = 50

tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)
requests_of_a_batch = st.lists(st.tuples(st.floats(0.5, 2.0), tokens, tokens), min_size=1, max_size=5)


class Request:
    """A request as vLLM's batch has it."""

    def __init__(self, penalty: float, prompt: list[int], answer: list[int]) -> None:
        self.penalty, self.prompt, self.answer = penalty, prompt, list(answer)
        self.params = penalize_here(SamplingParams(repetition_penalty=penalty))
        assert self.params.repetition_penalty == 1

    def at(self, row: int) -> AddedRequest:
        return row, self.params, self.prompt, self.answer


class Watched(list[int]):
    """An answer that notes from where on it was read."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(tokens)
        self.reads: list[int] = []

    def __getitem__(self, part: Any) -> Any:
        self.reads.append(part.start)
        return super().__getitem__(part)


def processor() -> RepetitionProcessor:
    return RepetitionProcessor(None, torch.device("cpu"), False)


def update(size: int, added=(), removed=(), moved=()) -> BatchUpdate:
    return BatchUpdate(batch_size=size, added=list(added), removed=list(removed), moved=list(moved))


def random_logits(rows: int) -> torch.Tensor:
    logits = 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))
    # What must not be drawn, and what is neither likely nor unlikely.
    logits[:, 7], logits[:, 8] = -torch.inf, 0.0
    return logits


def by_transformers(logits: torch.Tensor, requests: dict[int, Request]) -> torch.Tensor:
    rows = logits.clone()
    for row, request in requests.items():
        seen = torch.tensor([request.prompt + request.answer], dtype=torch.int64)
        rows[row] = RepetitionPenaltyLogitsProcessor(request.penalty)(seen, rows[row : row + 1])[0]
    return rows


@settings(deadline=None)
@given(batch=requests_of_a_batch, steps=st.lists(st.integers(0, VOCABULARY - 1), max_size=4))
def test_penalizes_as_transformers_and_vllm_do(batch, steps):
    requests = dict(enumerate(Request(*each) for each in batch))
    repetition, logits = processor(), random_logits(len(requests))
    repetition.update_state(update(len(requests), [each.at(row) for row, each in requests.items()]))
    for token in [None, *steps]:
        for request in requests.values():
            request.answer += [token] if token is not None else []
        repetition.update_state(None)
        penalized = repetition.apply(logits.clone())
        assert torch.equal(penalized, by_transformers(logits, requests))
        torch.testing.assert_close(penalized, by_vllm(logits, list(requests.values())))


def by_vllm(logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    longest = max(len(request.prompt) for request in requests)
    prompts = [request.prompt + [VOCABULARY] * (longest - len(request.prompt)) for request in requests]
    none, penalties = torch.zeros(len(requests)), torch.tensor([request.penalty for request in requests])
    answers = [request.answer for request in requests]
    asked = torch.tensor(prompts, dtype=torch.int64).reshape(len(requests), longest)
    return apply_all_penalties(logits.clone(), asked, none, none, penalties, answers)


def test_requests_without_a_penalty_stay_as_they_are():
    asked = penalize_here(SamplingParams())
    assert asked == SamplingParams()
    repetition, logits = processor(), random_logits(1)
    repetition.update_state(update(1, [(0, asked, [1], [2])]))
    assert torch.equal(repetition.apply(logits.clone()), logits)
    assert not repetition.is_argmax_invariant()


def test_follows_requests_that_join_leave_and_move():
    repetition, logits = processor(), random_logits(4)
    first, second, third = Request(1.5, [1, 2, 2], [3]), Request(0.7, [4], []), Request(1.2, [], [5, 6])
    batch = {0: first, 2: second}

    def check() -> None:
        repetition.update_state(None)
        assert torch.equal(repetition.apply(logits.clone()), by_transformers(logits, batch))
        for request in batch.values():
            request.answer.append(len(request.answer) + 10)

    repetition.update_state(update(4, [first.at(0), second.at(2)]))
    check()
    check()
    repetition.update_state(update(4, moved=[(0, 1, MoveDirectionality.UNIDIRECTIONAL)]))
    batch[1] = batch.pop(0)
    check()
    repetition.update_state(update(4, moved=[(1, 2, MoveDirectionality.SWAP)]))
    batch[1], batch[2] = batch[2], batch[1]
    check()
    # In the place of one that left comes one that is not penalized.
    repetition.update_state(
        update(4, [third.at(3), (2, penalize_here(SamplingParams()), [1], [])], removed=[1])
    )
    batch = {3: third}
    check()
    repetition.update_state(update(4, removed=[3]))
    batch = {}
    check()


def test_goes_on_where_there_is_no_room_left(monkeypatch):
    monkeypatch.setattr("shared.vllm.sampling.repetition._ROOM", 2)
    repetition, logits, request = processor(), random_logits(1), Request(1.3, [0], [])
    repetition.update_state(update(1, [request.at(0)]))
    for token in range(1, 20):
        request.answer.append(token)
        repetition.update_state(None)
        assert torch.equal(repetition.apply(logits.clone()), by_transformers(logits, {0: request}))


def test_what_was_seen_of_a_request_is_kept_while_it_is_out_of_the_batch():
    """A talker's request is, for each step for which its row has not come."""
    repetition, logits = processor(), random_logits(2)
    request, other = Request(1.3, [0], [1, 2]), Request(1.1, [3], [])
    request.answer = watched = Watched(request.answer)
    repetition.update_state(update(2, [request.at(0), other.at(1)]))
    repetition.update_state(update(1, removed=[0], moved=[(1, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert torch.equal(repetition.apply(logits.clone()), by_transformers(logits, {0: other}))
    request.answer.append(4)
    watched.reads.clear()
    repetition.update_state(update(2, [request.at(1)]))
    assert watched.reads == [2]
    assert torch.equal(repetition.apply(logits.clone()), by_transformers(logits, {0: other, 1: request}))


def test_another_answer_to_the_same_request_is_read_from_its_beginning():
    repetition, logits, request = processor(), random_logits(1), Request(1.3, [0], [1, 2])
    repetition.update_state(update(1, [request.at(0)]))
    request.answer = [5]
    repetition.update_state(update(1, [request.at(0)]))
    assert torch.equal(repetition.apply(logits.clone()), by_transformers(logits, {0: request}))
