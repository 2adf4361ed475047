"""Qwen2.5-Omni's thinker, as the stage takes it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from omnirelay.errors import CheckpointError
from services.families.qwen2_5_omni import files
from services.families.qwen2_5_omni.files import CODEC_RATE
from services.families.qwen2_5_omni.thinker.model import SpeakingThinker
from services.families.qwen2_5_omni.thinker.track import QwenTrackWriter
from services.families.qwen2_5_omni.voices import load_speakers
from services.families.qwen_media.features import FeatureExtractor
from services.families.qwen_media.media import QwenMedia
from services.thinker.family import Embed, ThinkerFamily


def end_token_ids(hf_config: Any) -> list[int]:
    """The thinker's ``eos_token_id``, as transformers' generate takes it; CheckpointError without one."""
    thinker = getattr(hf_config, "thinker_config", hf_config)
    for config in (thinker, thinker.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return list(ids) if isinstance(ids, list | tuple) else [int(ids)]
    raise CheckpointError("config.json: thinker_config names no eos_token_id, so no reply would ever end")


class QwenSpeech:
    """See :class:`services.thinker.family.SpeechWriter`; ``closing`` are the text's end and a pad."""

    further_rows = 1

    def __init__(self, voices: dict[str, torch.Tensor], closing: torch.Tensor) -> None:
        self.voices = voices
        self._closing = closing

    def track(self, request_id: str, prompt: Sequence[int], voice: str) -> QwenTrackWriter:
        """Begin a request's track."""
        return QwenTrackWriter(request_id, len(prompt), self.voices[voice], self._closing)


def read_speech(hf_config: Any, directory: Path, embed: Embed) -> QwenSpeech:
    """Read the embeddings of each voice's start token, and those of the text end and the text pad token.

    Raises CheckpointError if the voices cannot be read, or a token lies outside the vocabulary.
    """
    speakers = load_speakers(directory)
    talker = hf_config.talker_config
    closing_ids = [talker.tts_text_end_token_id, talker.tts_text_pad_token_id]
    ids = [*closing_ids, *(speaker.bos_token for speaker in speakers.values())]
    vocabulary = hf_config.thinker_config.text_config.vocab_size
    if outside := [token for token in ids if not 0 <= token < vocabulary]:
        raise CheckpointError(
            f"speech tokens {outside} (config.json, spk_dict.pt) lie outside the vocabulary of {vocabulary}"
        )
    embeds = embed(ids)
    return QwenSpeech(dict(zip(speakers, embeds[2:], strict=True)), embeds[:2])


THINKER: Final = ThinkerFamily(
    architecture=files.THINKER,
    model=SpeakingThinker,
    end_tokens=end_token_ids,
    speech=read_speech,
    rows_per_s=CODEC_RATE,
    media=lambda engine, media: QwenMedia(FeatureExtractor(engine, media.audio_clamp)),
)
