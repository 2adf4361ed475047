"""Qwen3-Omni's thinker, as the stage takes it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from omnirelay.errors import CheckpointError
from services.families.qwen3_omni import files
from services.families.qwen3_omni.thinker.media import ChunkExtractor
from services.families.qwen3_omni.thinker.model import FrameThinker
from services.families.qwen3_omni.thinker.track import PADS, ReplyTrackWriter, Roles
from services.families.qwen_media.media import QwenMedia
from services.thinker.family import Embed, ThinkerFamily


class ReplySpeech:
    """See :class:`services.thinker.family.SpeechWriter`; raises CheckpointError at unknown tokens."""

    further_rows = PADS + 1

    def __init__(self, hf_config: Any, _: Path, embed: Embed) -> None:
        self.voices = list(hf_config.talker_config.speaker_id or ()) if hf_config.enable_audio_output else []
        if not self.voices:
            return
        self._roles = Roles.of(hf_config)
        pad, begin, end = (getattr(hf_config, f"tts_{name}_token_id") for name in ("pad", "bos", "eos"))
        vocabulary = hf_config.thinker_config.text_config.vocab_size
        if outside := [token for token in (pad, begin, end) if not 0 <= token < vocabulary]:
            raise CheckpointError(
                f"config.json: speech tokens {outside} lie outside the vocabulary of {vocabulary}"
            )
        rows = embed([*[pad] * PADS, begin, end, pad])
        self._opening, self._closing = rows[: PADS + 1], rows[PADS + 1 :]

    def track(self, request_id: str, prompt: Sequence[int], voice: str) -> ReplyTrackWriter:
        """Begin a request's track; the talker is told its voice by the start."""
        del voice
        return ReplyTrackWriter(request_id, prompt, self._roles, self._opening, self._closing)


def end_token_ids(hf_config: Any) -> list[int]:
    """The end of a turn, as the reference's ``generate`` has it."""
    return [hf_config.im_end_token_id]


THINKER: Final = ThinkerFamily(
    architecture=files.THINKER,
    model=FrameThinker,
    end_tokens=end_token_ids,
    speech=ReplySpeech,
    rows_per_s=12.5,
    media=lambda engine, media: QwenMedia(ChunkExtractor(engine, media.audio_clamp)),
)
