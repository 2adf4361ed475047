"""The rules of media of Qwen3-Omni, as far as they differ from those of Qwen2.5-Omni.

The rules are those of transformers' ``Qwen3OmniMoeProcessor`` and of ``get_rope_index`` of its
``Qwen3OmniMoePreTrainedModelForConditionalGeneration``.  Each recording is taken as if it were the only one
of its request: the reference's features of one depend on how long the others are.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import CheckpointError, MediaError
from services.families.qwen_media.media import FRAMES, LENGTH, FeatureExtractor, Windows, with_tensors
from services.families.qwen_media.spans import SECONDS, Clock, Grid, Run, text_positions
from services.thinker.media.decoded import Samples
from services.thinker.media.rules import Positions
from shared.config.media import AudioClamp
from shared.messages import MediaKind

CHUNK_FRAMES: Final = 100
"""Mel frames that the encoder convolves together: a second."""
CHUNK_TOKENS: Final = 13
MASK: Final = "feature_attention_mask"
"""vLLM wants it, and does not read it."""


@dataclass(frozen=True)
class TokenClock(Clock):
    """A clock by which sound and frames alternate token by token; it has no chunks."""

    @classmethod
    def of(cls, thinker_config: Any) -> Self:
        """The clock that a checkpoint's ``thinker_config`` describes."""
        merge = int(thinker_config.vision_config.spatial_merge_size)
        return cls(float(thinker_config.position_id_per_seconds), chunk=0, merge=merge)

    def interleave(self, grid: Grid, audio_tokens: int) -> Iterator[Run]:
        """Before the pictures of a time comes the sound of all earlier ones."""
        size, heard = grid.height * grid.width, 0
        for index, time in enumerate(grid.times):
            before = min(max(heard, time), audio_tokens)
            if before > heard:
                yield "audio", heard, before
            yield "video", index * size, (index + 1) * size
            heard = before
        if heard < audio_tokens:
            yield "audio", heard, audio_tokens

    def marks(self, start: int) -> Positions:
        """Position ids of the two marks before, or behind, a video whose sound is heard."""
        return text_positions(2, start)


class ChunkWindows(Windows):
    """See :class:`Windows`; a window holds whole chunks of what the encoder convolves together."""

    @classmethod
    def of(cls, audio_config: Any) -> Self:
        """The windows within which an encoder attends; raises CheckpointError at chunks of another length."""
        if 2 * audio_config.n_window != CHUNK_FRAMES:
            raise CheckpointError(
                f"config.json: the audio encoder's n_window is {audio_config.n_window}, not 50"
            )
        return cls(int(audio_config.n_window_infer))

    @staticmethod
    def tokens(frames: int) -> int:
        """Tokens of so many mel frames: each chunk goes through three convolutions of stride 2."""
        rest = frames % CHUNK_FRAMES
        for _ in range(3):
            rest = (rest + 1) // 2
        return rest + frames // CHUNK_FRAMES * CHUNK_TOKENS

    def pieces(self, mel: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut a recording; less than a chunk stays with the window before it.

        Alone it would be padded otherwise before it is convolved.
        """
        pieces = list(super().pieces(mel))
        if len(pieces) > 1 and pieces[-1].shape[1] < CHUNK_FRAMES:
            pieces[-2:] = [torch.cat(pieces[-2:], dim=1)]
        return pieces


class ChunkExtractor(FeatureExtractor):
    """See :class:`FeatureExtractor`."""

    clock_type = TokenClock
    windows_type = ChunkWindows
    placeholder_key = "{}_token_id"
    default_frame_rate = 1.0

    def __init__(self, engine: LLMEngine, clamp: AudioClamp = "recording") -> None:
        super().__init__(engine, clamp)
        # The reference cuts off nothing.  The released checkpoints have no chunk_length, which is then 30 s.
        self.longest_audio_s = math.inf
        self._grid_s = self.sampling.temporal_patch_size / self.sampling.frames_per_second
        if not (self._grid_s * self.clock.positions_per_second).is_integer():
            raise CheckpointError(
                f"the checkpoint samples {self.sampling.frames_per_second:g} frames a second of videos, "
                "whose positions would be fractions: set fps in video_preprocessor_config.json to 1 or 2"
            )

    def _audio(self, samples: Samples, name: str) -> tuple[MultiModalKwargsItem, int]:
        if len(samples) <= self._extractor.n_fft // 2:
            # As much is reflected at both ends.
            raise MediaError(f"{name}: the model cannot take it: it is too short")
        # Not by vLLM's processor, which makes a frame more of a recording whose end is no whole frame.
        options = {"padding": True, "truncation": False, "return_tensors": "pt"}
        mel = self._extractor(samples, sampling_rate=self.sampling_rate, **options)["input_features"][0]
        length = torch.tensor([mel.shape[1]])
        batched = MultiModalFieldConfig.batched("audio", keep_on_cpu=True)
        fields = {
            FRAMES: MultiModalFieldConfig.flat_from_sizes("audio", length, dim=1),
            LENGTH: batched,
            MASK: batched,
        }
        inputs = {FRAMES: mel, LENGTH: length, MASK: torch.ones(1, mel.shape[1])}
        (item,) = MultiModalKwargsItems.from_hf_inputs(inputs, fields)["audio"]
        return item, self.windows.tokens(mel.shape[1])

    def _process(
        self, kind: MediaKind, item: Any, options: dict[str, Any], name: str
    ) -> tuple[MultiModalKwargsItem, int]:
        data, tokens = super()._process(kind, item, options, name)
        if kind == "video":
            # The processor does not know at what rate the frames were sampled.
            data = with_tensors(data, {SECONDS: torch.full_like(data[SECONDS].data, self._grid_s)})
        return data, tokens
