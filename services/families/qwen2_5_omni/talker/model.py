"""The talker: a Qwen2 decoder over codec tokens, conditioned by a row of the thinker at every position."""

import copy
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import WeightsMapper

from services.families.codec_decoder import CodecDecoder, in_sections
from services.families.qwen2_5_omni.files import is_of_another

MROPE_SECTION = "talker_mrope_section"
"""Where the engine's configuration keeps the M-RoPE sections.

They are taken out of ``rope_parameters`` before vLLM sees them: it would compute M-RoPE positions
from media of its own, but the talker's positions are the thinker's and come with the rows.
"""

CODES = "codes"
"""Where it keeps how many codec ids token2wav can make sound of; these are the smallest ones."""


class ConditionedTalker(CodecDecoder):
    """Codec tokens in, codec logits out; the input is ``proj(codec_embed(id) + row)``.

    The row of each position is read from paged KV memory, where the worker has put it.

    Reference: transformers' ``Qwen2_5OmniTalkerForConditionalGeneration``; its layers have biases on q, k
    and v, none on the output.
    """

    hf_to_vllm_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "token2wav.": None,
            "talker.codec_head.": "codec_head.",
            "talker.model.": "model.",
            "talker.thinker_to_talker_proj.": "proj.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:  # noqa: ARG002
        config = vllm_config.model_config.hf_config
        # vLLM's Qwen2 has heads of hidden / heads; its Llama with these biases is the same with any.
        llama = copy.deepcopy(config)
        llama.qkv_bias = True
        # Of its rotary embedding's table; the decoder puts its own in its place.
        llama.max_position_embeddings = 1
        model = LlamaModel(
            vllm_config=vllm_config.with_hf_config(llama, architectures=["LlamaForCausalLM"]), prefix="model"
        )
        super().__init__(
            vllm_config,
            model,
            in_sections(getattr(config, MROPE_SECTION)),
            _undrawable(config),
            config.tts_codec_mask_token_id,
            config.embedding_size,
        )
        self.model.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.embedding_size)
        self.proj = ReplicatedLinear(config.embedding_size, config.hidden_size, return_bias=False)

    def project(self, embeds: torch.Tensor) -> torch.Tensor:
        """See :meth:`CodecDecoder.project`."""
        projected: torch.Tensor = self.proj(embeds)
        return projected

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Whether vLLM's loader may leave out a file that has nothing but such tensors."""
        return is_of_another("talker", name)


def end_tokens(config: Any) -> list[int]:
    """Ids that end the speech, as in the reference (``talker_eos_token_id`` of its ``generate``)."""
    return [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]


def _undrawable(config: Any) -> torch.Tensor:
    """Bool ``[vocabulary]``: ids that are neither codes that token2wav knows nor end tokens.

    The reference suppresses the start token alone: of the other ids its token2wav fails.
    """
    undrawable = torch.arange(config.vocab_size) >= getattr(config, CODES)
    undrawable[end_tokens(config)] = False
    undrawable[config.tts_codec_start_token_id] = True
    return undrawable
