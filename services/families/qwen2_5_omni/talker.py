"""Qwen2.5-Omni's talker: a Qwen2 decoder over codec tokens, conditioned by a row of the thinker each."""

import copy
from typing import Any, ClassVar, Final

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import WeightsMapper

from omnirelay.errors import CheckpointError
from omnirelay.status import CodecDefaults, CodecLimits
from services.families.codec_decoder import CodecDecoder, default_rope, in_sections
from services.families.qwen2_5_omni import FRAME_SAMPLES, is_of_another
from services.talker.family import SpeechRules, TalkerFamily

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


START_POSITIONS: Final = 2
"""The voice's start token, and the first token of the reply."""
DEFAULTS: Final = CodecDefaults(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05)
"""Of the released model."""
_CODES_PER_BLOCK: Final = "codes_per_block"
"""Codec tokens in an attention block of token2wav's DiT, in the configuration that the engine keeps."""


def talker_config(config: Any) -> Any:
    """The talker's part of a configuration; raises CheckpointError if its positions are no M-RoPE's."""
    talker = getattr(config, "talker_config", None)
    if talker is None:
        return config
    dit = config.token2wav_config.dit_config
    setattr(talker, _CODES_PER_BLOCK, max(1, dit.block_size // dit.repeats))
    # The table has a row more than num_embeds says (reference: DiTCodecEmbedding).
    setattr(talker, CODES, dit.num_embeds + 1)
    sections = (talker.rope_parameters or {}).get("mrope_section")
    if sections is None:
        raise CheckpointError("config.json: talker_config names no mrope_section in its rope parameters")
    setattr(talker, MROPE_SECTION, sections)
    talker.rope_parameters = default_rope(talker.rope_parameters)
    return talker


def speech_rules(config: Any) -> SpeechRules:
    """How the checkpoint speaks, by what :func:`talker_config` returned."""
    mask = config.tts_codec_mask_token_id
    starts = [config.tts_codec_pad_token_id, config.tts_codec_start_token_id]
    return SpeechRules(
        row_width=config.embedding_size,
        prompt=lambda length, _: [mask] * length + starts,
        end_tokens=end_tokens(config),
        ids=getattr(config, CODES),
        codes_per_message=getattr(config, _CODES_PER_BLOCK),
        codec=CodecLimits(
            frame_samples=FRAME_SAMPLES, groups=1, start_positions=START_POSITIONS, defaults=DEFAULTS
        ),
    )


TALKER: Final = TalkerFamily(model=ConditionedTalker, config=talker_config, speech=speech_rules)
