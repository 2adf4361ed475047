"""Qwen2.5-Omni's talker, as the stage takes it."""

from typing import Any, Final

from omnirelay.errors import CheckpointError
from omnirelay.status import CodecDefaults, CodecLimits
from services.families.codec_decoder import default_rope
from services.families.qwen2_5_omni import files
from services.families.qwen2_5_omni.files import FRAME_SAMPLES
from services.families.qwen2_5_omni.talker.model import CODES, MROPE_SECTION, ConditionedTalker, end_tokens
from services.talker.family import SpeechRules, TalkerFamily

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
    talker.architectures = [files.TALKER]
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


TALKER: Final = TalkerFamily(
    architecture=files.TALKER, model=ConditionedTalker, config=talker_config, speech=speech_rules
)
