"""Qwen3-Omni's talker: a mixture of experts over codec frames, which draws one codebook of each itself."""

from typing import Any, ClassVar, Final

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import WeightsMapper

from omnirelay.errors import CheckpointError, UnknownSpeakerError
from omnirelay.status import CodecDefaults, CodecLimits
from services.families.codec_decoder import CodecDecoder, default_rope, interleaved
from services.families.qwen3_omni import frame_samples, trimmed_samples
from services.families.qwen3_omni.predictor import CodePredictor
from services.talker.family import SpeechRules, TalkerFamily

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


START_POSITIONS: Final = 9
"""The begin of the assistant's turn, marks of a reply without thoughts, the voice, the first reply token."""
TEXT_ALONE: Final = 3
"""So many of them have no codec id."""
DEFAULTS: Final = CodecDefaults(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05)
"""Of the reference's ``generate``."""
_SPECIAL: Final = (
    "codec_nothink_id",
    "codec_think_bos_id",
    "codec_think_eos_id",
    "codec_pad_id",
    "codec_bos_id",
    "codec_eos_token_id",
)


def talker_config(config: Any) -> Any:
    """The talker's part of a configuration; raises CheckpointError if its positions are no M-RoPE's."""
    talker = getattr(config, "talker_config", None)
    if talker is None:
        return config
    text = talker.text_config
    text.talker_mrope_section = (text.rope_parameters or {}).get("mrope_section", [24, 20, 20])
    text.rope_parameters = default_rope(text.rope_parameters)
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # The reference makes each layer a mixture, whatever these say.
    text.mlp_only_layers, text.decoder_sparse_step = [], 1
    text.code_predictor = talker.code_predictor_config
    text.frame_samples = frame_samples(config.code2wav_config)
    text.trimmed_samples = trimmed_samples(config.code2wav_config)
    text.speaker_id = {name.lower(): id_ for name, id_ in (talker.speaker_id or {}).items()}
    for name in _SPECIAL:
        setattr(text, name, getattr(talker, name))
    text.text_alone_id = _unused_id(text)
    return text


def _unused_id(config: Any) -> int:
    """An id that is neither drawn nor in a prompt: it stands where a position has no codec id."""
    used = {*config.speaker_id.values(), *(getattr(config, name) for name in _SPECIAL)}
    unused = set(range(config.vocab_size - SUPPRESSED, config.vocab_size)) - used
    if not unused:
        raise CheckpointError("config.json: talker_config uses each of its special codec ids")
    return max(unused)


def speech_rules(config: Any) -> SpeechRules:
    """How the checkpoint speaks, by what :func:`talker_config` returned."""

    def prompt(length: int, speaker: str) -> list[int]:
        voice = config.speaker_id.get(speaker.lower())
        if voice is None:
            raise UnknownSpeakerError(f"there is no speaker {speaker!r}")
        thinks_not = [config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id]
        alone = [config.text_alone_id] * (length + TEXT_ALONE)
        return [*alone, *thinks_not, voice, config.codec_pad_id, config.codec_bos_id]

    return SpeechRules(
        row_width=config.hidden_size,
        prompt=prompt,
        end_tokens=[config.codec_eos_token_id],
        ids=config.vocab_size - SUPPRESSED,
        codes_per_message=1,
        codec=CodecLimits(
            frame_samples=config.frame_samples,
            trimmed_samples=config.trimmed_samples,
            groups=config.code_predictor.num_code_groups,
            start_positions=START_POSITIONS,
            defaults=DEFAULTS,
        ),
    )


TALKER: Final = TalkerFamily(model=FrameTalker, config=talker_config, speech=speech_rules)
