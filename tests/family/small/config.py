"""The configuration of the small family, as transformers reads it."""

from typing import Any, Final

from transformers import AutoConfig, PretrainedConfig, Qwen2Config

HIDDEN: Final = 64
INNER_LAYER: Final = 1
"""Behind so many layers of the thinker the rows' hidden states are read."""
CODES: Final = 32
END, MASK = CODES, CODES + 1
"""The talker's token that ends the speech, and the one that stands for its prompt."""
RATE: Final = 25
SAMPLES_PER_FRAME: Final = 960
"""25 frames a second."""
BLOCK_FRAMES: Final = 4
CODE_DIM: Final = 16
VOICES: Final = {"Ada": 7, "Bob": 8}
"""Each voice's token in the thinker's vocabulary; its place is that in the vocoder's table."""


class SmallOmniConfig(Qwen2Config):
    """The thinker's, with the talker's in ``talker``."""

    model_type = "small_omni"


class SmallVocoderConfig(PretrainedConfig):
    """The vocoder's: all sizes are fixed."""

    model_type = "small_vocoder"


AutoConfig.register("small_omni", SmallOmniConfig)


def decoder_values(vocabulary: int) -> dict[str, Any]:
    """The sizes of a decoder."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "eos_token_id": 3,
        "tie_word_embeddings": False,
    }
