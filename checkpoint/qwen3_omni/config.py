"""The configuration of a Qwen3-Omni model, in the form of the released one."""

from collections.abc import Mapping
from typing import Any, Final

import transformers

from checkpoint.qwen3_omni.shape import Qwen3Shape, Values

SPEAKERS: Final = ("chelsie", "ethan", "aiden")
_SUPPRESSED: Final = 1024
"""So many of the largest codec ids stand for no code (transformers' ``generate``)."""
_CODEC_IDS: Final = {
    "codec_pad_id": 100,
    "codec_bos_id": 101,
    "codec_eos_token_id": 102,
    "codec_nothink_id": 107,
    "codec_think_bos_id": 108,
    "codec_think_eos_id": 109,
}
_FIRST_SPEAKER: Final = 253
"""How far behind the codes the released ids are."""
_ROPE: Final = {"rope_type": "default", "rope_theta": 1_000_000.0}
_MIXTURE: Final = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}


def model_config(shape: Qwen3Shape, roles: Mapping[str, int]) -> transformers.Qwen3OmniMoeConfig:
    """The whole model's; ``roles`` are the ids of the words that begin a turn."""
    ids = shape.special_ids
    media = {
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "position_id_per_seconds": 13,
        "user_token_id": roles["user"],
    }
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config=_thinker(shape) | media,
        talker_config=_talker(shape) | media,
        code2wav_config={
            **shape.code2wav,
            "codebook_size": shape.codes,
            "num_quantizers": shape.groups,
            "rope_parameters": _ROPE,
        },
        enable_audio_output=shape.speaks,
        im_start_token_id=ids["<|im_start|>"],
        im_end_token_id=ids["<|im_end|>"],
        tts_pad_token_id=ids["<tts_pad>"],
        tts_bos_token_id=ids["<tts_text_bos>"],
        tts_eos_token_id=ids["<tts_text_eod>"],
        **{f"{role}_token_id": token for role, token in roles.items()},
    )
    config.dtype = "float32"
    return config


def _thinker(shape: Qwen3Shape) -> dict[str, Any]:
    width = shape.text["hidden_size"]
    return {
        "text_config": {
            **_MIXTURE,
            **shape.text,
            "vocab_size": shape.vocabulary,
            "rope_parameters": _mrope(shape.text),
            # vLLM asks for these, and below.
            "tie_word_embeddings": False,
        },
        "audio_config": {**shape.audio, "num_mel_bins": 128, "output_dim": width},
        "vision_config": {
            **shape.vision,
            "out_hidden_size": width,
            "image_size": round(shape.vision["num_position_embeddings"] ** 0.5) * 16,
            "apply_vit_abs_pos_embed": True,
        },
    }


def _talker(shape: Qwen3Shape) -> dict[str, Any]:
    vocabulary = shape.codes + _SUPPRESSED
    ids = {name: shape.codes + place for name, place in _CODEC_IDS.items()}
    first = shape.codes + _FIRST_SPEAKER
    return {
        "text_config": {
            **_MIXTURE,
            **shape.talker,
            "vocab_size": vocabulary,
            "rope_parameters": _mrope(shape.talker),
        },
        "code_predictor_config": {
            **shape.predictor,
            "hidden_size": shape.talker["hidden_size"],
            "vocab_size": shape.codes,
            "num_code_groups": shape.groups,
            "max_position_embeddings": 2 * shape.groups,
            "rope_parameters": _ROPE,
        },
        "num_code_groups": shape.groups,
        "thinker_hidden_size": shape.text["hidden_size"],
        "accept_hidden_layer": shape.accepted_layer,
        "spatial_merge_size": 2,
        "speaker_id": {name: first + place for place, name in enumerate(SPEAKERS)},
        **ids,
    }


def _mrope(sizes: Values) -> dict[str, Any]:
    """M-RoPE, interleaved: three eighths of a head's pairs for height and width each, as released."""
    pairs = sizes["head_dim"] // 2
    side = 5 * pairs // 16
    return _ROPE | {"mrope_section": [pairs - 2 * side, side, side], "mrope_interleaved": True}
