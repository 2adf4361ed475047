"""Qwen2.5-Omni's thinker: vLLM's, which also keeps a row for each position; its track for the talker."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
    merge_interleaved_embeddings,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec

from omnirelay.errors import CheckpointError
from services.families.qwen2_5_omni import CODEC_RATE, is_of_another
from services.families.qwen2_5_omni.voices import load_speakers
from services.families.qwen_media.media import FeatureExtractor
from services.families.qwen_media.spans import Clock, engine_positions
from services.thinker.family import Embed, ThinkerFamily
from services.thinker.speaking import SpeakingModel
from services.thinker.track import TrackWriter
from shared.messages import ConditioningRows


class InterleavingThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    """vLLM's thinker, which also merges a video with sound where a step cuts it."""

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Text embeddings ``[n, hidden]`` with those of media in their places."""
        if multimodal_embeddings and is_multimodal is not None:
            ids = input_ids.to(is_multimodal.device)
            is_video = is_multimodal & (ids == self.config.video_token_index)
            is_audio = is_multimodal & (ids == self.config.audio_token_index)
            if is_video.any() and is_audio.any():
                # vLLM puts embeddings in place kind by kind only where it sees the kinds alternate within the
                # step, which a step that cuts a video with sound may hide from it.
                embeds: torch.Tensor = self._embed_text_input_ids(
                    input_ids, self.get_language_model().embed_input_ids, is_multimodal=is_multimodal
                )
                return merge_interleaved_embeddings(
                    embeds, multimodal_embeddings, is_video, is_audio, is_multimodal
                )
        return super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5OmniThinkerMultiModalProcessor,
    info=Qwen2_5OmniThinkerProcessingInfo,
    dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder,
)
class SpeakingThinker(SpeakingModel, InterleavingThinker):
    """A thinker whose hidden states can be spoken.

    A position's row is its last hidden state + its text embedding, which is zero at image, audio and video
    tokens: what transformers' ``Qwen2_5OmniForConditionalGeneration.generate`` hands to the talker.
    """

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Whether vLLM's loader may leave out a file that has nothing but such tensors."""
        return is_of_another("thinker", name)

    def row_of(self, hidden: torch.Tensor, embeds: torch.Tensor, is_text: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, hidden]``, in one pass over them."""
        return torch.addcmul(hidden, embeds, is_text)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """M-RoPE position ids int64 ``[3, n]`` of a prompt, and what a token behind it adds to its index."""
        return engine_positions(input_tokens, mm_features, Clock.of(self.config))


class QwenTrackWriter(TrackWriter):
    """One request's conditioning track, as transformers builds it in ``generate``.

    The talker's positions are: the prompt's n tokens, the voice's start token, then the reply's tokens
    (all but the last, which is never computed), the text end token and the text pad token; the last
    row repeats for as long as the talker talks.

    Position ids are the thinker's in the prompt, and run on by one behind its last token for the two start
    positions; from then on they count from the largest so far, which may be that of a picture or video.

    The text embeddings are ``[hidden]`` of the voice's start token, ``[2, hidden]`` of the closing tokens.
    """

    def __init__(
        self, request_id: str, prompt_tokens: int, voice_row: torch.Tensor, closing_rows: torch.Tensor
    ) -> None:
        super().__init__(request_id, prompt_tokens, prompt_tokens + 1, voice_row.unsqueeze(0), closing_rows)

    def rows(self, start: int, rows: torch.Tensor, positions: torch.Tensor) -> ConditioningRows:
        """See :meth:`TrackWriter.rows`."""
        in_prompt = max(0, min(self.prompt_rows - start, rows.shape[0]))
        ids, parts = positions[:, :in_prompt], [rows[:in_prompt]]
        if in_prompt:
            self._next_position = int(ids[:, -1].max()) + 1
            self._largest_position = max(self._largest_position, int(ids.max()))
            if start + in_prompt == self.prompt_rows:
                parts.append(self._opening)
        return self._message([*parts, rows[in_prompt:]], ids)


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
    model=SpeakingThinker,
    end_tokens=end_token_ids,
    speech=read_speech,
    rows_per_s=CODEC_RATE,
    media=lambda engine, media: FeatureExtractor(engine, media.audio_clamp),
)
