"""A second model family: other rows, frames of two codec ids, a vocoder of one pass.

Its thinker and its talker are Qwen2 decoders.  A row is a token's embedding, and behind it the hidden state.
The talker samples the first id of a frame, and a second head gives the other.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from services.families.family import Family, Paged, SynthesisBytes
from shared.families.description import Description
from shared.messages import StageName

if TYPE_CHECKING:
    from services.talker.family import TalkerFamily
    from services.thinker.family import ThinkerFamily
    from services.token2wav.family import SynthesisFamily


def _check_files(_: Path) -> None:
    """There are none besides those that all checkpoints have."""


def _paged(_: Mapping[str, Any]) -> dict[StageName, Paged]:
    return {"thinker": Paged(512, 512), "talker": Paged(512, 320)}


def _thinker() -> "ThinkerFamily":
    from tests.family.small.thinker import THINKER  # noqa: PLC0415 - loads PyTorch and vLLM

    return THINKER


def _talker() -> "TalkerFamily":
    from tests.family.small.talker import TALKER  # noqa: PLC0415 - as above

    return TALKER


def _token2wav() -> "SynthesisFamily":
    from tests.family.small.token2wav import TOKEN2WAV  # noqa: PLC0415 - as above

    return TOKEN2WAV


DESCRIPTION: Final = Description(
    model_type="small_omni", vocabulary=("vocab_size",), placeholders={}, default_speaker="Ada"
)
SMALL: Final = Family(
    model_type=DESCRIPTION.model_type,
    files=("config.json",),
    check_files=_check_files,
    weights={"thinker": "thinker", "talker": "talker", "token2wav": "vocoder"},
    models={},
    paged=_paged,
    synthesis=SynthesisBytes(0, 1000, 1000),
    thinker=_thinker,
    talker=_talker,
    token2wav=_token2wav,
)
