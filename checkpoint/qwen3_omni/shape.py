"""The sizes of a Qwen3-Omni checkpoint, part by part, by the names that transformers' configurations have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from checkpoint.shape import audio_sizes, decoder_sizes

Values = Mapping[str, Any]
SPECIAL: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Qwen3Shape:
    """Sizes; attention on a CPU needs heads of 32 values, and a mixture of experts widths that 32 divides.

    ``codes`` are the ids of a code book; ``trained`` the byte-pair tokens, which precede the special ones;
    ``pixels`` the fewest and the most that a picture is scaled to.
    """

    text: Values
    audio: Values
    vision: Values
    talker: Values
    predictor: Values
    code2wav: Values
    codes: int = 64
    groups: int = 4
    accepted_layer: int = 2
    speaks: bool = True
    trained: int = 1536
    vocabulary: int = 1600
    longest_seconds: int = 60
    pixels: tuple[int, int] = (64 * 64, 256 * 256)

    @property
    def special_ids(self) -> dict[str, int]:
        """The id of each special token; they follow each other."""
        return {text: self.trained + place for place, text in enumerate(SPECIAL)}


TINY: Final = Qwen3Shape(
    text=decoder_sizes(64, 96, 4, 4, 2) | {"head_dim": 32, **_EXPERTS},
    audio=audio_sizes(32, 64, 2, 2) | {"downsample_hidden_size": 16},
    vision={
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    talker=decoder_sizes(64, 96, 3, 4, 2)
    | {"head_dim": 32, "shared_expert_intermediate_size": 32, **_EXPERTS},
    predictor={
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    code2wav={
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "decoder_dim": 32,
    },
)
_SOME_EXPERTS: Final = {"num_experts": 16, "num_experts_per_tok": 4}
# The relations of the released sizes, made small: frames of 16 codes, few of many experts.
SMALL: Final = Qwen3Shape(
    text=decoder_sizes(512, 1024, 8, 8, 2) | {"head_dim": 64, **_SOME_EXPERTS, "moe_intermediate_size": 512},
    audio=audio_sizes(256, 1024, 4, 4) | {"downsample_hidden_size": 64},
    vision={
        "depth": 6,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_heads": 4,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 2, 4],
    },
    talker=decoder_sizes(256, 512, 6, 4, 2)
    | {
        "head_dim": 64,
        "shared_expert_intermediate_size": 256,
        **_SOME_EXPERTS,
        "moe_intermediate_size": 128,
    },
    predictor={**TINY.predictor, "intermediate_size": 768, "num_hidden_layers": 3, "head_dim": 64},
    code2wav={
        **TINY.code2wav,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "decoder_dim": 128,
    },
    codes=2048,
    groups=16,
    accepted_layer=4,
)
