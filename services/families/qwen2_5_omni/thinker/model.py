"""The thinker: vLLM's Qwen2.5-Omni thinker that also keeps a conditioning row per position."""

from typing import Any

import torch
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
    merge_interleaved_embeddings,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec

from services.families.qwen2_5_omni.files import is_of_another
from services.families.qwen_media.spans import Clock, engine_positions
from services.thinker.speaking import SpeakingModel


class InterleavingThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    """vLLM's thinker, which also merges a video with sound where a step cuts it."""

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Text embeddings ``[n, hidden]`` with those of media in their places."""
        if multimodal_embeddings and is_multimodal is not None:
            ids = input_ids.to(is_multimodal.device)
            is_video = is_multimodal & (ids == self.config.video_token_index)
            is_audio = is_multimodal & (ids == self.config.audio_token_index)
            if is_video.any() and is_audio.any():
                # vLLM puts embeddings in place kind by kind only where it sees the kinds alternate within the
                # step, which a step that cuts a video with sound may hide from it.
                embeds: torch.Tensor = self._embed_text_input_ids(
                    input_ids, self.get_language_model().embed_input_ids, is_multimodal=is_multimodal
                )
                return merge_interleaved_embeddings(
                    embeds, multimodal_embeddings, is_video, is_audio, is_multimodal
                )
        return super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5OmniThinkerMultiModalProcessor,
    info=Qwen2_5OmniThinkerProcessingInfo,
    dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder,
)
class SpeakingThinker(SpeakingModel, InterleavingThinker):
    """A thinker whose hidden states can be spoken.

    A position's row is its last hidden state + its text embedding, which is zero at image, audio and video
    tokens: what transformers' ``Qwen2_5OmniForConditionalGeneration.generate`` hands to the talker.
    """

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Whether vLLM's loader may leave out a file that has nothing but such tensors."""
        return is_of_another("thinker", name)

    def row_of(self, hidden: torch.Tensor, embeds: torch.Tensor, is_text: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, hidden]``, in one pass over them."""
        return torch.addcmul(hidden, embeds, is_text)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """M-RoPE position ids int64 ``[3, n]`` of a prompt, and what a token behind it adds to its index."""
        return engine_positions(input_tokens, mm_features, Clock.of(self.config))
