"""Qwen3-Omni: a thinker whose inner layer conditions a talker of several codebooks, and a causal vocoder."""

from typing import TYPE_CHECKING, Final

from services.families.family import Family
from services.families.qwen3_omni.codec import SYNTHESIS
from services.families.qwen3_omni.files import FILES, MODELS, WEIGHTS, check_files, paged

if TYPE_CHECKING:
    from services.talker.family import TalkerFamily
    from services.thinker.family import ThinkerFamily
    from services.token2wav.family import SynthesisFamily


def _thinker() -> "ThinkerFamily":
    from services.families.qwen3_omni.thinker.family import THINKER  # noqa: PLC0415 - loads PyTorch and vLLM

    return THINKER


def _talker() -> "TalkerFamily":
    from services.families.qwen3_omni.talker.family import TALKER  # noqa: PLC0415 - as above

    return TALKER


def _token2wav() -> "SynthesisFamily":
    from services.families.qwen3_omni.code2wav.family import TOKEN2WAV  # noqa: PLC0415 - as above

    return TOKEN2WAV


QWEN3_OMNI: Final = Family(
    model_type="qwen3_omni_moe",
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
