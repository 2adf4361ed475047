"""Qwen3-Omni: a thinker whose inner layer conditions a talker of several codebooks, and a causal vocoder."""

from typing import Final

from services.families.family import Family, part
from services.families.qwen3_omni.codec import SYNTHESIS
from services.families.qwen3_omni.files import FILES, MODELS, WEIGHTS, check_files, paged

QWEN3_OMNI: Final = Family(
    model_type="qwen3_omni_moe",
    files=FILES,
    check_files=check_files,
    weights=WEIGHTS,
    models=MODELS,
    paged=paged,
    synthesis=SYNTHESIS,
    thinker=part("services.families.qwen3_omni.thinker.family:THINKER"),
    talker=part("services.families.qwen3_omni.talker.family:TALKER"),
    token2wav=part("services.families.qwen3_omni.code2wav.family:TOKEN2WAV"),
)
