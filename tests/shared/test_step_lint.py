"""What thinker and talker add to vLLM's steps, as on a GPU: the host never waits for it.

The device is ``meta``, which has no values; the code takes the paths of GPUs there.
"""

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from services.thinker.penalties import AnswerPenalties
from shared.vllm.sampling.arguments import arguments_of
from shared.vllm.sampling.drawing import DrawProcessor
from shared.vllm.sampling.repetition import RepetitionProcessor, penalize_here
from shared.vllm.transfer import all_to_device, to_device
from tests.shared.test_conditioning import WIDTH, store_of
from tests.support.drawing import params_of
from tests.support.steps import step_of

META = torch.device("meta")
VOCABULARY = 500


def request(number: int) -> SamplingParams:
    """One of the kinds of requests that a batch may have."""
    kinds: list[dict[str, Any]] = [{"top_k": 40, "top_p": 0.8}, {}, {"top_p": 0.9}, {"temperature": 0.0}]
    params = params_of(seed=number, repetition_penalty=1.1, **kinds[number % len(kinds)])
    arguments_of(params).presence = 0.5
    return penalize_here(params)


@pytest.mark.parametrize("kind", [DrawProcessor, RepetitionProcessor, AnswerPenalties])
@pytest.mark.parametrize("size", [1, 8])
def test_sampling_waits_for_nothing(kind: type[Any], size: int) -> None:
    answers: list[list[int]] = [[3 + number] for number in range(size)]
    added = [(row, request(row), [1, 2], answers[row]) for row in range(size)]
    processor, seen = kind(None, META, False), []
    for step in range(4):
        update = BatchUpdate(size, removed=[], added=added if step == 0 else [], moved=[])
        logits = torch.empty(size, VOCABULARY, device=META)
        with step_of("meta") as lint:
            processor.update_state(update if step < 2 else None)
            assert processor.apply(logits) is logits
        seen.append(lint.count)
        for answer in answers:
            answer.append(10 + step)
    assert min(seen) > 3


def test_rows_come_and_go_without_waiting() -> None:
    store, _ = store_of()
    store.layer.kv_cache = store.layer.kv_cache.to(META)
    slots, rows = torch.tensor([17, 40]), torch.zeros(2, WIDTH)
    with step_of("meta") as lint:
        store.scatter(slots, rows, torch.zeros(3, 2, dtype=torch.int64))
        found, ids = store.gather(to_device(slots, META))
    assert (found.shape, ids.shape) == ((2, WIDTH), (3, 2))
    assert lint.count > 5


def test_several_tensors_go_by_one_copy() -> None:
    with step_of("meta") as lint:
        places, flags = all_to_device([torch.tensor([1, 2]), torch.tensor([[True]])], META)
    assert (places.shape, places.dtype, flags.dtype) == ((2,), torch.int64, torch.bool)
    assert len(lint._pinned) == 1


@pytest.mark.parametrize(
    "step",
    [
        lambda values: values + torch.tensor([3.0]).to(META, non_blocking=True),
        lambda values: values + to_device(torch.tensor([3.0]), META).to("cpu"),
        lambda values: torch.empty(3).copy_(values),
        lambda values: values.nonzero(),
        lambda values: values[values > 0],
        lambda values: values.masked_select(values > 0),
    ],
)
def test_what_waits_is_found(step: Any) -> None:
    with (
        pytest.raises((AssertionError, NotImplementedError), match=r"within a step|meta tensor"),
        step_of("meta"),
    ):
        step(torch.empty(3, device=META))


@pytest.mark.parametrize(
    "step",
    [
        lambda values: values.sum().item(),
        lambda values: values * torch.tensor([2.0]),
        lambda values: values[values > 0],
        lambda values: values.index_put_((values > 0,), torch.zeros(())),
    ],
)
def test_what_waits_is_found_where_values_are_needed(step: Any) -> None:
    with pytest.raises(AssertionError, match=r"within a step"), step_of("cpu"):
        step(torch.ones(3))
