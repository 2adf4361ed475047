"""Qwen2.5-Omni, as gateways know it."""

from typing import Final

from shared.families.description import Description, openai_voices

SPEECH_SYSTEM_PROMPT: Final = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory "
    "and visual inputs, as well as generating text and speech."
)
"""What the released checkpoints were trained to speak with; their chat template has another one."""

QWEN2_5_OMNI: Final = Description(
    model_type="qwen2_5_omni",
    vocabulary=("thinker_config", "text_config", "vocab_size"),
    placeholders={"<|AUDIO|>": "audio", "<|IMAGE|>": "image", "<|VIDEO|>": "video"},
    default_speaker="Chelsie",
    voice_aliases=openai_voices("Chelsie", "Ethan"),
    speech_system_prompt=SPEECH_SYSTEM_PROMPT,
    audio_window_s=2.0,
)
