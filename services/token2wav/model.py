"""A synthesizer as a vLLM pooling model without attention layers of vLLM's, hence without a KV cache."""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import IsAttentionFree
from vllm.model_executor.models.interfaces_base import attn_type

from services.token2wav.family import Synthesizer
from services.token2wav.pooler import SynthesisPooler


@attn_type("attention_free")
class SynthesisModel(nn.Module, IsAttentionFree):
    """Base class of the models that make audio: a family sets the synthesizer up, and loads weights.

    Its tokens are advances of chunks and carry nothing: ``forward`` returns zeros and the work is the
    pooler's.
    """

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        del prefix
        self._hidden_size = vllm_config.model_config.get_hidden_size()

    def synthesize_with(self, synthesizer: Synthesizer) -> None:
        """Set what makes the audio."""
        self.pooler = SynthesisPooler(synthesizer)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> zeros, float32 [tokens, hidden]."""
        return torch.zeros(input_ids.shape[0], self._hidden_size, device=input_ids.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return zeros, float32 [tokens, hidden]: see the class."""
        del input_ids, intermediate_tensors, inputs_embeds
        return torch.zeros(positions.shape[-1], self._hidden_size, device=positions.device)
