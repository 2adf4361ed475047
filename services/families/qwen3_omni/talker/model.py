"""The talker: a mixture-of-experts decoder over codec frames, which draws one codebook of each itself."""

from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import WeightsMapper

from services.families.codec_decoder import CodecDecoder, interleaved
from services.families.qwen3_omni.talker.predictor import CodePredictor

SUPPRESSED = 1024
"""So many of the largest ids are not drawn, but for the end of the speech (reference: ``generate``)."""


class FrameTalker(CodecDecoder):
    """Frames of codec tokens in, the logits of the next frame's first id out.

    The input of a position is its row, which the thinker has projected, and the embeddings of its codec
    ids: of all codebooks at a frame, of one id in the prompt, of none at the token that stands for text.

    Reference: transformers' ``Qwen3OmniMoeTalkerForConditionalGeneration``.
    """

    hf_to_vllm_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "code2wav.": None,
            "talker.text_projection.": None,
            "talker.hidden_projection.": None,
            "talker.code_predictor.": "code_predictor.",
            "talker.codec_head.": "codec_head.",
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.model.": "model.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        del prefix
        config = vllm_config.model_config.hf_config
        model = Qwen3MoeModel(
            vllm_config=vllm_config.with_hf_config(config, architectures=["Qwen3MoeForCausalLM"]),
            prefix="model",
        )
        axes = interleaved(config.talker_mrope_section, config.head_dim // 2)
        undrawable = torch.arange(config.vocab_size) >= config.vocab_size - SUPPRESSED
        undrawable[config.codec_eos_token_id] = False
        further = config.code_predictor.num_code_groups - 1
        super().__init__(
            vllm_config, model, axes, undrawable, config.text_alone_id, config.hidden_size, further
        )
        self.code_predictor = CodePredictor(config.code_predictor, vllm_config.scheduler_config.max_num_seqs)

    def embed_frames(self, input_ids: torch.Tensor, further_ids: torch.Tensor) -> torch.Tensor:
        """See :meth:`CodecDecoder.embed_frames`."""
        # Special ids in the prompt are no frames.
        is_frame = (input_ids < self.config.vocab_size - SUPPRESSED).unsqueeze(-1)
        return self.embed_input_ids(input_ids) + self.code_predictor.embed(further_ids.T) * is_frame

    def further_codes(self, hidden: torch.Tensor, codes: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Complete frames, see :class:`services.talker.family.TalkerModel`."""
        found: torch.Tensor = self.code_predictor(hidden, self.model.embed_tokens(codes), draws)
        return found
