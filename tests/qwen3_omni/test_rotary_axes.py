"""Which axis each frequency of M-RoPE belongs to, as transformers lays them out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerTextRotaryEmbedding,
)

from services.families.codec_decoder import in_sections, interleaved


@pytest.mark.parametrize("sections", [[24, 20, 20], [4, 2, 2], [2, 3, 3], [6, 1, 1], [8, 0, 0]])
@pytest.mark.parametrize("frequencies", [4, 8, 64])
def test_interleaved_axes_are_the_references(sections: list[int], frequencies: int) -> None:
    reference: Any = SimpleNamespace(mrope_section=sections)
    axes = torch.arange(3).view(3, 1, 1, 1).repeat(1, 1, 1, frequencies)
    chosen = Qwen3OmniMoeThinkerTextRotaryEmbedding.recomposition_frequencies(reference, axes)
    # Of each frequency transformers keeps a sine's and a cosine's place.
    assert interleaved(sections, frequencies) == chosen.flatten().tolist()[:frequencies]


def test_axes_beside_each_other() -> None:
    assert in_sections([1, 3, 2]) == [0, 1, 1, 1, 2, 2]
