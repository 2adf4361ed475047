"""Decoded media to what the encoders take, by vLLM's multimodal processor.

Mel frames may depend on nothing that comes later.  The reference (transformers'
``WhisperFeatureExtractor``) clamps log-mel values at the maximum of the whole recording - 8, so a loud moment
changes quiet frames before it.  With ``causal`` the maximum is that up to the end of a frame's window: the
same where the loudest moment is in the first window.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import MediaError
from services.families.qwen_media.spans import Clock, Grid, Marks
from services.thinker.media.decoded import DecodedAudio, DecodedImage, DecodedVideo, Samples
from services.thinker.media.rules import FrameSampling
from shared.config.media import AudioClamp
from shared.messages import MediaKind

_NO_TIMING: Final = TimingContext(enabled=False)
FRAMES: Final = "input_audio_features"
LENGTH: Final = "audio_feature_lengths"
_SMALLEST: Final = 1e-10
_RANGE: Final = 8.0
_SHIFT: Final = 4.0
_LOOK_AHEAD_TOKENS: Final = 3
"""So much of a recording, 0.12 s, follows a settled window: resampling and mel frames look ahead."""


@dataclass(frozen=True)
class Features:
    """One item for an encoder: an image, a video's frames or sound, or a window of a recording."""

    digest: str  # Names the features in the prefix cache and the encoder cache
    kind: MediaKind
    data: MultiModalKwargsItem  # The encoder's input, as vLLM names it
    tokens: int  # Tokens that it is in the prompt
    grid: Grid | None = None  # How they are laid out; none for sound

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        tensors = (element.data for element in self.data.values())
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


class FeatureExtractor:
    """Runs the checkpoint's processors on one item at a time; safe to use from any thread."""

    clock_type = Clock
    default_frame_rate = 2.0
    """Of videos: checkpoints do not say; this is what the reference's processor supposes."""

    def __init__(self, engine: LLMEngine, marks: Marks, clamp: AudioClamp = "recording") -> None:
        self._marks = marks
        self._processor: Any = engine.input_processor.renderer.get_mm_processor()
        self._one_at_a_time = threading.Lock()
        thinker = engine.model_config.hf_config.thinker_config
        self.clock: Final = self.clock_type.of(thinker)
        self.window_frames: Final = self.window_frames_of(thinker.audio_config)
        self._clamp: Final = clamp
        extractor = self._extractor = self._processor.info.get_feature_extractor()
        self.sampling_rate: Final = int(extractor.sampling_rate)
        self.longest_audio_s: Final = float(extractor.chunk_length)
        videos = self._processor.info.get_hf_processor().video_processor
        self.sampling: Final = FrameSampling(
            frames_per_second=float(videos.fps or self.default_frame_rate),
            min_frames=int(videos.min_frames),
            max_frames=int(videos.max_frames),
            temporal_patch_size=int(videos.temporal_patch_size),
        )

    def extract(
        self, digest: str, decoded: DecodedAudio | DecodedImage | DecodedVideo, name: str
    ) -> tuple[Features, ...]:
        """The windows of a recording, an image, or a video's pictures and, if it is heard, its sound.

        Raises MediaError if the checkpoint's processor refuses the item, which it calls ``name``.
        """
        if isinstance(decoded, DecodedAudio):
            data, tokens = self._audio(decoded.samples, name)
            if self._clamp == "causal":
                log_mel = log_mel_of(decoded.samples, self._extractor)[:, : data[FRAMES].data.shape[1]]
                mel = clamp_by_window(log_mel, self.window_frames)
                data = MultiModalKwargsItem({**data, FRAMES: replace(data[FRAMES], data=mel)})
            windows = tuple(self.windows(data))
            if sum(window.tokens for window in windows) != tokens:
                raise MediaError(f"{name}: its windows do not have the {tokens} tokens of the whole")
            return windows
        if isinstance(decoded, DecodedImage):
            return (self._visual(digest, "image", Image.fromarray(decoded.pixels), name),)
        if decoded.audio is None:
            return (self._visual(digest, "video", decoded.frames, name),)
        pictures = self._visual(f"{digest}.video", "video", decoded.frames, name)
        data, tokens = self._audio(decoded.audio, f"{name}'s sound")
        return pictures, Features(f"{digest}.audio", "audio", data, tokens)

    @staticmethod
    def window_frames_of(audio_config: Any) -> int:
        """Mel frames of a window of a recording."""
        return window_frames(int(audio_config.n_window))

    def windows(self, data: MultiModalKwargsItem) -> Iterator[Features]:
        """Cut a recording into windows that the encoder may be given one by one."""
        return cut_windows(data, self.window_frames)

    def settled(self, windows: Sequence[Features]) -> tuple[Features, ...]:
        """The first windows of a recording, which further audio does not change, unless it is louder."""
        return settled(windows, self.window_frames)

    def _audio(self, samples: Samples, name: str) -> tuple[MultiModalKwargsItem, int]:
        # The reference pads to its whole window of minutes, and throws the padding's frames away.  A second
        # of silence behind the end gives the same frames to the last bit.
        longest = {"audio_kwargs": {"max_length": len(samples) + self.sampling_rate}}
        return self._process("audio", (samples, self.sampling_rate), longest, name)

    def _visual(self, digest: str, kind: MediaKind, pictures: Any, name: str) -> Features:
        data, tokens = self._process(kind, pictures, {}, name)
        patches = data[f"{kind}_grid_thw"].data.tolist()
        seconds = float(data["second_per_grid_ts"].data) if kind == "video" else 0.0
        return Features(digest, kind, data, tokens, Grid.of(patches, seconds, self.clock))

    def _process(
        self, kind: MediaKind, item: Any, options: dict[str, Any], name: str
    ) -> tuple[MultiModalKwargsItem, int]:
        """The encoder's input for one item, and the number of its tokens."""
        try:
            with self._one_at_a_time:
                items = self._processor.info.parse_mm_data({kind: [item]})
                # A name in place of the hash that vLLM would compute of every sample and pixel.
                inputs = ProcessorInputs(
                    [self._marks.placeholders[kind]], items, {kind: [name]}, hf_processor_mm_kwargs=options
                )
                result = self._processor.apply(inputs, _NO_TIMING)
        except ValueError as error:
            # vLLM's own words may hold the whole array; those of the checkpoint's processor lie below them.
            reason = str(error.__cause__)[:200] if error.__cause__ else "it is too short"
            raise MediaError(f"{name}: the model cannot take it: {reason}") from error
        return result["mm_kwargs"][kind][0], len(result["prompt_token_ids"])


def window_frames(n_window: int) -> int:
    """Mel frames of as few attention windows of the encoder, of ``2 * n_window``, as make whole tokens."""
    return math.lcm(2 * n_window, 4)


def audio_tokens(frames: int) -> int:
    """Tokens of so many mel frames: a convolution and a pooling, each of stride 2."""
    return (frames + 1) // 2 // 2


def cut_windows(data: MultiModalKwargsItem, frames: int) -> Iterator[Features]:
    """Cut a recording into windows of ``frames``, each named by its features.

    The encoder convolves and attends within each of them, so it gives the same for them as for the whole.
    Frames at the end that make no token are left out.
    """
    for piece in data[FRAMES].data.split(frames, dim=1):
        if tokens := audio_tokens(piece.shape[1]):
            yield window_of(data, piece, tokens)


def window_of(data: MultiModalKwargsItem, piece: torch.Tensor, tokens: int) -> Features:
    """A window of a recording: some of its mel frames ``[bins, frames]``, and how many tokens they are."""
    mel = piece.contiguous()
    hasher = hashlib.sha256(repr(tuple(mel.shape)).encode())
    # As bytes: NumPy has no bfloat16.
    hasher.update(mel.view(torch.uint8).numpy().data)
    changed = {FRAMES: mel, LENGTH: torch.full_like(data[LENGTH].data, mel.shape[1])}
    elements = {name: replace(data[name], data=tensor) for name, tensor in changed.items()}
    return Features(
        f"audio.{hasher.hexdigest()}", "audio", MultiModalKwargsItem({**data, **elements}), tokens
    )


def settled(
    windows: Sequence[Features], frames: int, tokens_of: Callable[[int], int] = audio_tokens
) -> tuple[Features, ...]:
    """The first windows of a recording, which further audio does not change, unless it is louder."""
    whole = [window.tokens == tokens_of(frames) for window in windows]
    behind = accumulate((window.tokens for window in reversed(windows)), initial=0)
    tokens_behind = list(behind)[-2::-1]
    return tuple(
        window
        for window, complete, more in zip(windows, whole, tokens_behind, strict=True)
        if complete and more >= _LOOK_AHEAD_TOKENS
    )


def log_mel_of(samples: Samples, extractor: Any) -> torch.Tensor:
    """The reference's log-mel ``[bins, frames]`` of a recording and a second of silence, before it clamps."""
    padded = np.concatenate([samples, np.zeros(int(extractor.sampling_rate), np.float32)])
    window = torch.hann_window(extractor.n_fft)
    waveform = torch.from_numpy(padded)
    stft = torch.stft(waveform, extractor.n_fft, extractor.hop_length, window=window, return_complex=True)
    power = (stft[..., :-1].abs() ** 2).contiguous()
    mel = torch.from_numpy(extractor.mel_filters).to(torch.float32).T @ power
    return torch.clamp(mel, min=_SMALLEST).log10()


def clamp_by_window(log_mel: torch.Tensor, frames: int) -> torch.Tensor:
    """Clamp and scale log-mel ``[bins, n]``, each window of ``frames`` by the maximum up to its end."""
    loudest = torch.tensor(-torch.inf)
    pieces = []
    for window in log_mel.split(frames, dim=1):
        loudest = torch.maximum(loudest, window.max())
        pieces.append((torch.maximum(window, loudest - _RANGE) + _SHIFT) / _SHIFT)
    return torch.cat(pieces, dim=1)
