"""What thinker and talker add to vLLM's steps, as on a GPU: rows by KV slot, and no waiting of the host."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from services.thinker.penalties import AnswerPenalties
from shared.vllm.conditioning import ConditioningStore
from shared.vllm.sampling.arguments import arguments_of
from shared.vllm.sampling.drawing import DrawProcessor
from shared.vllm.sampling.repetition import RepetitionProcessor, penalize_here
from shared.vllm.transfer import all_to_device, to_device
from tests.support.steps import Recorder, params_of, step_of

WIDTH, BLOCKS, BLOCK_SIZE = 8, 4, 16


def store_of(cache_dtype: Any = "auto") -> tuple[ConditioningStore, VllmConfig]:
    """A store of four blocks, as vLLM binds its memory, and the configuration that it was made with."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        store = ConditioningStore(WIDTH, 2, CacheConfig(cache_dtype=cache_dtype))
    store.layer.kv_cache = torch.zeros(BLOCKS, 1, BLOCK_SIZE, WIDTH, dtype=store.layer.kv_cache_torch_dtype)
    return store, config


@contextmanager
def a_pass(store: ConditioningStore, config: VllmConfig, slots: list[int]) -> Iterator[None]:
    """A forward pass over tokens with these slots."""
    mapping = {store.layer.layer_name: torch.tensor(slots)}
    with set_forward_context(None, config, slot_mapping=mapping):
        yield


def test_rows_are_written_after_a_warm_up_in_inference_mode():
    store, config = store_of()
    with torch.inference_mode(), a_pass(store, config, [-1, -1]):
        assert store.read_batch(2) is not None
    rows = torch.arange(2 * WIDTH, dtype=torch.float16).view(2, WIDTH)
    ids = torch.tensor([[5, 6], [7, 8], [9, 10]], dtype=torch.int32)
    store.scatter(torch.tensor([17, 40]), rows, ids)
    read_rows, read_ids = store.gather(torch.tensor([17, 40]))
    assert torch.equal(read_rows, rows)
    assert torch.equal(read_ids, ids.to(torch.int64))


def test_what_a_graph_reads_stays_at_its_address():
    store, config = store_of()
    with torch.inference_mode(), a_pass(store, config, [-1]):
        store.read_batch(1)
        addresses = store._row_table().data_ptr(), store._id_table().data_ptr()
        store.scatter(torch.tensor([3]), torch.ones(1, WIDTH), torch.ones(3, 1))
        assert (store._row_table().data_ptr(), store._id_table().data_ptr()) == addresses


def resolved(store: ConditioningStore, attention: Any) -> CUDAGraphMode:
    """The mode that vLLM's runner of GPUs chooses for a model with this attention and a store."""
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    compilation.set_splitting_ops_for_v1(all2all_backend="naive", data_parallel_size=1)
    runner = SimpleNamespace(
        vllm_config=VllmConfig(),
        compilation_config=compilation,
        uniform_decode_query_len=1,
        kv_cache_config=SimpleNamespace(has_mamba_layers=False, num_blocks=BLOCKS),
        max_num_reqs=16,
        cudagraph_dispatcher=Mock(),
        speculative_config=None,
    )
    backends = [{attention, store.layer.get_attn_backend()}]
    GPUModelRunner._check_and_update_cudagraph_mode(runner, backends, [Mock()])
    return compilation.cudagraph_mode


@pytest.mark.parametrize("attention", [FlashAttentionBackend, TritonAttentionBackend])
def test_decoding_is_captured_as_a_whole(attention):
    store, _ = store_of()
    mode = resolved(store, attention)
    assert mode.decode_mode() is CUDAGraphMode.FULL
    assert mode.mixed_mode() is CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_rows_keep_the_models_dtype_beside_a_quantised_cache(cache_dtype):
    store, _ = store_of(cache_dtype)
    # Without a model vLLM supposes float16.
    assert store.layer.kv_cache_torch_dtype is torch.float16
    assert store.layer.impl.kv_cache_dtype == "auto"


META = torch.device("meta")
"""It has no values; the code takes the paths of GPUs there."""
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


CHECKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "meta": lambda: step_of("meta"),
    "cpu": lambda: step_of("cpu"),
    "recorded": Recorder,
}
ALIKE: list[Callable[[torch.Tensor], Any]] = [
    lambda values: values.sum().item(),
    lambda values: values * torch.tensor([2.0]),
    lambda values: values[values > 0],
    lambda values: values.nonzero(),
]


@pytest.mark.parametrize(
    ("check", "step"),
    [
        ("meta", lambda values: values + torch.tensor([3.0]).to(META, non_blocking=True)),
        ("meta", lambda values: values + to_device(torch.tensor([3.0]), META).to("cpu")),
        ("meta", lambda values: torch.empty(3).copy_(values)),
        ("meta", lambda values: values.masked_select(values > 0)),
        ("cpu", lambda values: values.index_put_((values > 0,), torch.zeros(()))),
        ("recorded", lambda values: values.to("meta")),
        *(("meta", step) for step in ALIKE[2:]),
        *((check, step) for check in ("cpu", "recorded") for step in ALIKE),
    ],
)
def test_what_waits_is_found(check: str, step: Callable[[torch.Tensor], Any]) -> None:
    values = torch.ones(3, device="meta" if check == "meta" else "cpu")
    # Some operators have nothing to do on ``meta`` themselves.
    allowed = (AssertionError, NotImplementedError) if check == "meta" else AssertionError
    with pytest.raises(allowed, match=r"within a step|meta tensor"), CHECKS[check]():
        step(values)
