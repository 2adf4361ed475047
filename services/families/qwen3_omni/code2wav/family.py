"""Qwen3-Omni's code2wav, as the stage takes it."""

import copy
from typing import Any, Final

from services.families.qwen3_omni.code2wav.model import WHOLE, Code2WavForSynthesis, geometry_of
from services.families.qwen3_omni.code2wav.synthesizer import PieceWork
from services.families.qwen3_omni.files import voices
from services.token2wav.family import SynthesisFamily


def code2wav_config(config: Any) -> Any:
    """A copy of code2wav's part of a whole model's configuration, which may be changed for vLLM."""
    whole = getattr(config, "code2wav_config", None)
    if whole is None:
        return config if hasattr(config, WHOLE) else None
    nominal = copy.deepcopy(whole)
    setattr(nominal, WHOLE, whole)
    return nominal


TOKEN2WAV: Final = SynthesisFamily(
    architecture="OmniRelayCode2Wav",
    model=Code2WavForSynthesis,
    config=code2wav_config,
    geometry=geometry_of,
    work=lambda config, synthesis: PieceWork(geometry_of(config), synthesis),
    voices=voices,
)
