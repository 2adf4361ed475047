"""Rows by KV slot as on a GPU: after vLLM's warm-up, in full CUDA graphs, beside a quantised cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
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
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from shared.vllm.conditioning import ConditioningStore

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
