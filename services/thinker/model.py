"""The thinker: vLLM's Qwen2.5-Omni thinker that also keeps a conditioning row per position."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from shared.engine.conditioning import ConditioningStore


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5OmniThinkerMultiModalProcessor,
    info=Qwen2_5OmniThinkerProcessingInfo,
    dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder,
)
class SpeakingThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    """A thinker whose hidden states can be spoken.

    A position's row is its last hidden state + its text embedding, where the text embedding is zero
    at image, audio and video tokens: what transformers'
    ``Qwen2_5OmniForConditionalGeneration.generate`` hands to the talker.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        text_config = self.config.text_config
        self.conditioning = ConditioningStore(
            text_config.hidden_size, text_config.num_hidden_layers, vllm_config.cache_config
        )
        # A buffer of its own: vLLM computes embeddings outside the captured part of a step.
        most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.register_buffer(
            "text_embeds",
            torch.zeros(most_tokens, text_config.hidden_size, dtype=vllm_config.model_config.dtype),
            persistent=False,
        )

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embed the tokens of a step ``[n]`` as ``[n, hidden]``, and note the text part for the rows."""
        embeds: torch.Tensor = super().embed_input_ids(
            input_ids, multimodal_embeddings, is_multimodal=is_multimodal
        )
        text = embeds
        if is_multimodal is not None:
            text = torch.where(is_multimodal.to(embeds.device).unsqueeze(-1), 0, embeds)
        self.text_embeds[: embeds.shape[0]] = text
        return embeds

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Last hidden states ``[n, hidden]`` of a step; keeps their rows on the way."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        hidden = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        if isinstance(hidden, torch.Tensor):
            self.conditioning.write_batch(hidden + self.text_embeds[: hidden.shape[0]], positions)
        return hidden
