"""Qwen2.5-Omni's thinker, as the stage takes it."""

from typing import Final

from services.families.qwen2_5_omni import files
from services.families.qwen2_5_omni.codec import CODEC_RATE
from services.families.qwen2_5_omni.thinker.media import QwenMedia
from services.families.qwen2_5_omni.thinker.model import SpeakingThinker
from services.families.qwen2_5_omni.thinker.speech import end_token_ids, read_speech_embeddings
from services.families.qwen2_5_omni.thinker.track import QwenTrackWriter
from services.thinker.family import ThinkerFamily

THINKER: Final = ThinkerFamily(
    architecture=files.THINKER,
    model=SpeakingThinker,
    end_tokens=end_token_ids,
    read_embeddings=read_speech_embeddings,
    track=QwenTrackWriter,
    rows_per_s=CODEC_RATE,
    media=QwenMedia.of,
)
