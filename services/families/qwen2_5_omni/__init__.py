"""Qwen2.5-Omni: a thinker whose last hidden states condition a talker, and a DiT with BigVGAN."""

from typing import Final

from services.families.family import Family, part
from services.families.qwen2_5_omni.files import FILES, MODELS, SYNTHESIS, WEIGHTS, check_files, paged

QWEN2_5_OMNI: Final = Family(
    model_type="qwen2_5_omni",
    files=FILES,
    check_files=check_files,
    weights=WEIGHTS,
    models=MODELS,
    paged=paged,
    synthesis=SYNTHESIS,
    thinker=part("services.families.qwen2_5_omni.thinker.family:THINKER"),
    talker=part("services.families.qwen2_5_omni.talker.family:TALKER"),
    token2wav=part("services.families.qwen2_5_omni.token2wav.family:TOKEN2WAV"),
)
