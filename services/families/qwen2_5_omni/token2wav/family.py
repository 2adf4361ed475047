"""Qwen2.5-Omni's token2wav, as the stage takes it."""

from typing import Any, Final

from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig

from services.families.qwen2_5_omni.token2wav.model import Token2WavForSynthesis
from services.families.qwen2_5_omni.token2wav.synthesis import SolverWork, component_configs, geometry_of
from services.families.qwen2_5_omni.voices import load_speakers
from services.token2wav.chunks import CodecGeometry
from services.token2wav.family import SynthesisFamily


def token2wav_config(config: Any) -> Any:
    """Token2wav's part of a whole model's configuration; none if it is of another family."""
    narrowed = getattr(config, "token2wav_config", config)
    return narrowed if isinstance(narrowed, Qwen2_5OmniToken2WavConfig) else None


def geometry(config: Any) -> CodecGeometry:
    """How codec ids, mel frames, attention blocks and samples relate."""
    return geometry_of(*component_configs(config))


TOKEN2WAV: Final = SynthesisFamily(
    architecture="OmniRelayToken2Wav",
    model=Token2WavForSynthesis,
    config=token2wav_config,
    geometry=geometry,
    work=lambda config, synthesis: SolverWork(geometry(config), synthesis),
    voices=lambda directory: list(load_speakers(directory)),
)
