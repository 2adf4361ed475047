"""Qwen2.5-Omni: a thinker whose last hidden states condition a talker, and a DiT with BigVGAN."""

from typing import TYPE_CHECKING, Final

from services.families.family import Family
from services.families.qwen2_5_omni.files import FILES, MODELS, SYNTHESIS, WEIGHTS, check_files, paged

if TYPE_CHECKING:
    from services.talker.family import TalkerFamily
    from services.thinker.family import ThinkerFamily
    from services.token2wav.family import SynthesisFamily


def _thinker() -> "ThinkerFamily":
    from services.families.qwen2_5_omni.thinker.family import THINKER  # noqa: PLC0415 - loads PyTorch and vLLM

    return THINKER


def _talker() -> "TalkerFamily":
    from services.families.qwen2_5_omni.talker.family import TALKER  # noqa: PLC0415 - as above

    return TALKER


def _token2wav() -> "SynthesisFamily":
    from services.families.qwen2_5_omni.token2wav.family import TOKEN2WAV  # noqa: PLC0415 - as above

    return TOKEN2WAV


QWEN2_5_OMNI: Final = Family(
    model_type="qwen2_5_omni",
    files=FILES,
    check_files=check_files,
    weights=WEIGHTS,
    models=MODELS,
    paged=paged,
    synthesis=SYNTHESIS,
    thinker=_thinker,
    talker=_talker,
    token2wav=_token2wav,
)
