"""A talker's rotary embedding: M-RoPE whose angles are computed once a step, for all layers."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


class StepRotary(RotaryEmbedding):
    """vLLM's plain rotary embedding over a table that has a row for each token of the step.

    vLLM's own M-RoPE puts the angles of the three axes together in every layer, which takes as long as the
    attention on a CPU.  Here each row holds the angles of its token's three position ids, and the layers see
    plain positions: 0 to n.  Table and positions are buffers: compiled code and CUDA graphs find them where
    they were.  ``axes`` has the axis of each frequency: :func:`in_sections` or :func:`interleaved`.

    Reference: transformers' ``Qwen2_5OmniRotaryEmbedding``, ``Qwen3OmniMoeTalkerRotaryEmbedding``.
    """

    axes: torch.Tensor
    inverse_frequencies: torch.Tensor
    rows: torch.Tensor

    def __init__(self, head_size: int, base: float, axes: Sequence[int], most_tokens: int) -> None:
        dtype = torch.get_default_dtype()
        super().__init__(head_size, head_size, most_tokens, base, True, dtype, init_cache=False)
        buffers: dict[str, Any] = {
            "cos_sin_cache": torch.zeros(most_tokens, head_size, dtype=dtype),
            "axes": torch.tensor(axes),
            "inverse_frequencies": self._compute_inv_freq(base),
            "rows": torch.arange(most_tokens),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def begin(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Fill the table by a step's M-RoPE ids ``[3, n]``; gives int64 positions ``[n]`` for its layers."""
        count, pairs = position_ids.shape[1], self.inverse_frequencies.shape[0]
        angles = position_ids.to(torch.float32)[self.axes].T * self.inverse_frequencies
        self.cos_sin_cache[:count, :pairs] = angles.cos()
        self.cos_sin_cache[:count, pairs:] = angles.sin()
        return self.rows[:count]


def in_sections(sections: Sequence[int]) -> list[int]:
    """The axis of each frequency, where the frequencies of an axis are beside each other."""
    return [axis for axis, count in enumerate(sections) for _ in range(count)]


def interleaved(sections: Sequence[int], frequencies: int) -> list[int]:
    """The axis of each frequency, where the axes alternate as long as each has frequencies left."""
    return [place % 3 if place < 3 * sections[place % 3] else 0 for place in range(frequencies)]
