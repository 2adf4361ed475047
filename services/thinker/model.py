"""The thinker: vLLM's Qwen2.5-Omni thinker that also keeps a conditioning row per position."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
    merge_interleaved_embeddings,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sequence import IntermediateTensors

from services.thinker.media.spans import Clock
from services.thinker.positions import prompt_positions
from shared.vllm.conditioning import ConditioningStore


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

    Attributes:
        prompt_lengths: Of the requests that begin with this step, by ``id`` of their list of tokens: how
            many of these are the prompt.  What follows is a reply that is read again.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        text_config = self.config.text_config
        self.prompt_lengths: dict[int, int] = {}
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
        embeds = self._merge_media(input_ids, multimodal_embeddings, is_multimodal)
        text = embeds
        if is_multimodal is not None:
            text = torch.where(is_multimodal.to(embeds.device).unsqueeze(-1), 0, embeds)
        self.text_embeds[: embeds.shape[0]] = text
        return embeds

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """M-RoPE position ids int64 ``[3, n]`` of a prompt, and what a token behind it adds to its index."""
        # What is read again of a reply has the positions that it had when it was drawn: they count from the
        # largest of the prompt, which need not be that of its last token.
        length = self.prompt_lengths.get(id(input_tokens), len(input_tokens))
        positions = torch.from_numpy(prompt_positions(length, mm_features, Clock.of(self.config)))
        following = torch.arange(len(input_tokens) - length) + positions.max() + 1
        behind = int(positions.max()) + 1 - length
        return torch.cat([positions, following.expand(3, -1)], dim=1), behind

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

    def _merge_media(
        self, input_ids: torch.Tensor, media: Any, is_multimodal: torch.Tensor | None
    ) -> torch.Tensor:
        """Text embeddings with those of media in their places."""
        if media and is_multimodal is not None:
            ids = input_ids.to(is_multimodal.device)
            is_video = is_multimodal & (ids == self.config.video_token_index)
            is_audio = is_multimodal & (ids == self.config.audio_token_index)
            if is_video.any() and is_audio.any():
                # vLLM puts embeddings in place kind by kind only where it sees the kinds alternate within the
                # step, which a step that cuts a video with sound may hide from it.
                embeds: torch.Tensor = self._embed_text_input_ids(
                    input_ids, self.get_language_model().embed_input_ids, is_multimodal=is_multimodal
                )
                return merge_interleaved_embeddings(embeds, media, is_video, is_audio, is_multimodal)
        return super().embed_input_ids(input_ids, media, is_multimodal=is_multimodal)
