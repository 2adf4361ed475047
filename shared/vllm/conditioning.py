"""Conditioning rows in paged KV memory.

What the talker needs of the thinker is one row per position: last hidden state + text embedding, and
the three M-RoPE position ids.  Both models keep these rows at the position's KV slot, so that prefix
caching, chunked prefill and preemption hold for rows as they hold for keys and values.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn
from vllm.config import CacheConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.extract_hidden_states import (
    CacheOnlyAttentionBackend,
    CacheOnlyAttentionLayer,
    CacheOnlyAttentionMetadataBuilder,
)
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig

from shared.vllm.transfer import to_device

LAYER_NAME = "conditioning"


class RowMetadataBuilder(CacheOnlyAttentionMetadataBuilder):
    """vLLM's builder, for layers that full CUDA graphs may contain.

    vLLM's own says that they may not, and one such layer keeps full graphs from the whole model.  Here all
    that a graph reads stays at its address from step to step: the KV cache, the table of ids, and the slots,
    which vLLM keeps in one buffer.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class RowBackend(CacheOnlyAttentionBackend):
    """vLLM's backend for layers that only keep something, with :class:`RowMetadataBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[RowMetadataBuilder]:
        """The builder of the layer's metadata."""
        return RowMetadataBuilder


class RowLayer(CacheOnlyAttentionLayer):
    """vLLM's layer that only keeps something, with :class:`RowBackend`; see :class:`ConditioningStore`."""

    def __init__(self, width: int, layer_index: int, cache_config: CacheConfig) -> None:
        if is_quantized_kv_cache(cache_config.cache_dtype):
            # Rows are the talker's input, not keys and values: they keep the model's dtype.
            cache_config = replace(cache_config, cache_dtype="auto")
        super().__init__(1, width, cache_config, f"{LAYER_NAME}.{layer_index}")
        self.attn_backend = RowBackend


class ConditioningStore(nn.Module):
    """One row, three position ids and perhaps further ids per KV slot.

    Args:
        width: Elements of a row.
        layer_index: An index no attention layer of the model has; vLLM wants one in the layer's name.
        cache_config: vLLM's; the rows have the model's dtype, also beside a quantised KV cache.
        further_ids: Of a slot, behind the position ids: a talker keeps there what a frame of codec tokens
            has besides the token that vLLM knows.
    """

    def __init__(self, width: int, layer_index: int, cache_config: CacheConfig, further_ids: int = 0) -> None:
        super().__init__()
        self.width = width
        self.further_ids = further_ids
        self.layer = RowLayer(width, layer_index, cache_config)
        self._ids: torch.Tensor | None = None

    def write_batch(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Keep the rows of the tokens in this forward pass.

        Args:
            rows: ``[n, width]``, model dtype.
            positions: ``[3, n]`` or ``[n]`` position ids.
        """
        self.layer(rows.unsqueeze(1))
        slots = self._batch_slots(rows.shape[0])
        if slots is not None:
            three = positions if positions.dim() == 2 else positions.unsqueeze(0).expand(3, -1)
            self._id_table()[slots] = three[:, : rows.shape[0]].T.to(torch.int32)

    def read_batch(self, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows and positions of the tokens in this forward pass.

        Args:
            count: Tokens in the pass, padding included.

        Returns:
            Rows ``[count, width]`` and ids int64 ``[3 + further_ids, count]``, the positions first; none
            while vLLM only measures memory and there is no KV cache yet.
        """
        slots = self._batch_slots(count)
        return None if slots is None else self.gather(slots)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[n, width]`` and ids int64 ``[3 + further_ids, n]`` at the given slots (int64 ``[n]``)."""
        return self._row_table()[slots], self._id_table()[slots].T.to(torch.int64).contiguous()

    def scatter(self, slots: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Write rows ``[n, width]`` and ids ``[3 + further_ids, n]`` at the given slots (int64 ``[n]``)."""
        table = self._row_table()
        slots = to_device(slots, table.device)
        table[slots] = to_device(rows.to(table.dtype), table.device)
        self._id_table()[slots] = to_device(ids.T.to(torch.int32), table.device)

    def _batch_slots(self, count: int) -> torch.Tensor | None:
        """Slots of the tokens in this pass; padding goes to the null block, which no request owns."""
        mapping = get_forward_context().slot_mapping
        slots = mapping.get(self.layer.layer_name) if isinstance(mapping, dict) else None
        if slots is None or self.layer.kv_cache.numel() == 0:
            return None
        return slots[:count].clamp_min(0)

    def _row_table(self) -> torch.Tensor:
        """``[slots, width]``, the KV cache itself: a slot is a place in a block, a block has one head."""
        return self.layer.kv_cache.view(-1, self.width)

    def _id_table(self) -> torch.Tensor:
        """int32 ``[slots, 3 + further_ids]``, made when the KV cache exists: its dtype could not hold ids."""
        slots = self._row_table().shape[0]
        if self._ids is None or self._ids.shape[0] != slots:
            width = 3 + self.further_ids
            # On a GPU the first step is vLLM's warm-up, in inference mode; rows are written outside it.
            with torch.inference_mode(False):
                self._ids = torch.zeros(slots, width, dtype=torch.int32, device=self.layer.kv_cache.device)
        return self._ids


class SlotMap:
    """Finds the KV slots of a request's positions, for the group of layers that holds the rows."""

    def __init__(self, kv_cache_config: KVCacheConfig, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        self._group, spec = next(
            (index, group.kv_cache_spec)
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if any(name.startswith(f"{LAYER_NAME}.") for name in group.layer_names)
        )
        self._block_size = spec.block_size

    def slots(self, request_id: str, start: int, stop: int) -> torch.Tensor:
        """Slots of positions ``start`` to ``stop`` of a scheduled request, int64 ``[stop - start]``."""
        blocks = self._manager.get_block_ids(request_id)[self._group]
        first = start // self._block_size
        if stop == start + 1:
            # A decoded token: one number needs no arithmetic on tensors.
            return torch.tensor([blocks[first] * self._block_size + start % self._block_size])
        table = torch.tensor(blocks[first : -(-stop // self._block_size)], dtype=torch.int64)
        positions = torch.arange(start, stop)
        return table[positions // self._block_size - first] * self._block_size + positions % self._block_size
