"""Qwen3-Omni, as gateways know it."""

from typing import Final

from shared.families.description import Description, openai_voices

QWEN3_OMNI: Final = Description(
    model_type="qwen3_omni_moe",
    vocabulary=("thinker_config", "text_config", "vocab_size"),
    placeholders={"<|audio_pad|>": "audio", "<|image_pad|>": "image", "<|video_pad|>": "video"},
    default_speaker="Ethan",
    voice_aliases=openai_voices("Chelsie", "Ethan"),
    audio_window_s=8.0,
)
