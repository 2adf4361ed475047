"""Decoded media to what the encoders take, by vLLM's multimodal processor, and to their places in a prompt.

Mel frames may depend on nothing that comes later.  The reference (transformers'
``WhisperFeatureExtractor``) clamps log-mel values at the maximum of the whole recording - 8, so a loud moment
changes quiet frames before it.  With ``causal`` the maximum is that up to the end of a frame's window: the
same where the loudest moment is in the first window.
"""

import hashlib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final, Self

import numpy as np
import torch
from PIL import Image
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import MediaError
from services.families.qwen_media.spans import GRID, SECONDS, Clock, Grid, Marks, Run
from services.thinker.media.decoded import Decoded, DecodedAudio, DecodedImage, Pixels, Samples
from services.thinker.media.rules import FrameSampling
from shared.config.media import AudioClamp
from shared.messages import MediaKind

_NO_TIMING: Final = TimingContext(enabled=False)
FRAMES: Final = "input_audio_features"
LENGTH: Final = "audio_feature_lengths"
PIXELS: Final = "pixel_values_videos"
_SMALLEST: Final = 1e-10
_RANGE: Final = 8.0
_SHIFT: Final = 4.0
_LOOK_AHEAD_TOKENS: Final = 3
"""So much of a recording, 0.12 s, follows a settled window: resampling and mel frames look ahead."""


@dataclass(frozen=True)
class Features:
    """One item for an encoder: an image, frames of a video, or windows of a sound."""

    digest: str  # Names the features in the prefix cache and the encoder cache
    kind: MediaKind
    data: MultiModalKwargsItem  # The encoder's input, as vLLM names it
    tokens: int  # Tokens that it is in the prompt

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        tensors = (element.data for element in self.data.values())
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a prompt: an image, a window of a recording, or frames with their sound."""

    features: tuple[Features, ...]
    runs: tuple[tuple[MediaKind, int], ...]  # The order of their tokens: kind and number

    @classmethod
    def of(cls, features: Features) -> Self:
        """A piece of one kind."""
        return cls((features,), ((features.kind, features.tokens),))

    def tokens_of(self, kind: MediaKind) -> int:
        """Number of tokens of a kind."""
        return sum(each.tokens for each in self.features if each.kind == kind)


@dataclass(frozen=True)
class Windows:
    """How a recording is cut into windows that the encoder may be given one by one.

    The encoder convolves and attends within each of them, so it gives the same for them as for the whole.
    """

    frames: int  # Mel frames of a window

    @classmethod
    def of(cls, audio_config: Any) -> Self:
        """As few attention windows of an encoder, of ``2 * n_window`` frames, as make whole tokens."""
        return cls(math.lcm(2 * int(audio_config.n_window), 4))

    @staticmethod
    def tokens(frames: int) -> int:
        """Tokens of so many mel frames: a convolution and a pooling, each of stride 2."""
        return (frames + 1) // 2 // 2

    def pieces(self, mel: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut mel frames ``[bins, n]``."""
        return mel.split(self.frames, dim=1)

    def cut(self, data: MultiModalKwargsItem) -> Iterator[Features]:
        """Cut a recording; each window is named by its features, and what makes no token is left out."""
        for piece in self.pieces(data[FRAMES].data):
            if tokens := self.tokens(piece.shape[1]):
                yield window_of(data, piece, tokens)

    def settled(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """The first pieces of what is recorded, which what follows does not change, unless it is louder."""
        window, sounds = self.tokens(self.frames), [piece.tokens_of("audio") for piece in pieces]
        behind = list(accumulate(reversed(sounds), initial=0))[-2::-1]
        return tuple(
            piece
            for piece, tokens, more in zip(pieces, sounds, behind, strict=True)
            if tokens and not tokens % window and more >= _LOOK_AHEAD_TOKENS
        )


class FeatureExtractor:
    """Runs the checkpoint's processors on one item at a time.

    See :class:`services.thinker.media.rules.MediaRules`.
    """

    clock_type = Clock
    windows_type = Windows
    placeholder_key = "{}_token_index"
    """Where ``thinker_config`` has the token that stands for an item of a kind."""
    default_frame_rate = 2.0
    """Of videos: checkpoints do not say; this is what the reference's processor supposes."""

    def __init__(self, engine: LLMEngine, clamp: AudioClamp = "recording") -> None:
        self._processor: Any = engine.input_processor.renderer.get_mm_processor()
        self._one_at_a_time = threading.Lock()
        thinker = engine.model_config.hf_config.thinker_config
        self.clock: Final = self.clock_type.of(thinker)
        self.marks: Final = Marks.of(thinker, self.placeholder_key)
        self.placeholders: Mapping[MediaKind, int] = self.marks.placeholders
        self.windows: Final = self.windows_type.of(thinker.audio_config)
        self._clamp: Final = clamp
        extractor = self._extractor = self._processor.info.get_feature_extractor()
        self.sampling_rate = int(extractor.sampling_rate)
        self.longest_audio_s = float(extractor.chunk_length)
        videos = self._processor.info.get_hf_processor().video_processor
        self.sampling = FrameSampling(
            frames_per_second=float(videos.fps or self.default_frame_rate),
            min_frames=int(videos.min_frames),
            max_frames=int(videos.max_frames),
            temporal_patch_size=int(videos.temporal_patch_size),
        )

    def prepare(self, digest: str, decoded: Decoded, name: str) -> "QwenMediaItem":
        """Compute the encoders' input of an item."""
        return QwenMediaItem(digest, self.extract(digest, decoded, name))

    def settled(self, item: "QwenMediaItem") -> "QwenMediaItem":
        """The first pieces of what is recorded, which what follows does not change, unless it is louder."""
        return QwenMediaItem(item.digest, self.windows.settled(item.pieces))

    def lay_out(self, prompt: Sequence[int], items: Sequence["QwenMediaItem"]) -> MultiModalInput:
        """Replace each placeholder of a prompt by the tokens of its item."""
        return lay_out(prompt, items, self.marks)

    def extract(self, digest: str, decoded: Decoded, name: str) -> tuple[Piece, ...]:
        """The windows of a recording, an image, or a video, which is cut where windows of a heard sound end.

        Raises MediaError if the checkpoint's processor refuses the item, which it calls ``name``.
        """
        if isinstance(decoded, DecodedAudio):
            return tuple(map(Piece.of, self._recording(decoded.samples, name)))
        if isinstance(decoded, DecodedImage):
            data, tokens = self._process("image", Image.fromarray(decoded.pixels), {}, name)
            return (Piece.of(Features(digest, "image", data, tokens)),)
        data, tokens = self._process("video", decoded.frames, {}, name)
        if decoded.audio is None:
            return (Piece.of(Features(digest, "video", data, tokens)),)
        windows = self._recording(decoded.audio, f"{name}'s sound")
        return tuple(alternating(data, decoded.frames, windows, self.clock))

    def _recording(self, samples: Samples, name: str) -> Sequence[Features]:
        data, tokens = self._audio(samples, name)
        if self._clamp == "causal":
            log_mel = log_mel_of(samples, self._extractor)[:, : data[FRAMES].data.shape[1]]
            mel = clamp_by_window(log_mel, self.windows.frames)
            data = with_tensors(data, {FRAMES: mel})
        windows = tuple(self.windows.cut(data))
        if sum(window.tokens for window in windows) != tokens:
            raise MediaError(f"{name}: its windows do not have the {tokens} tokens of the whole")
        return windows

    def _audio(self, samples: Samples, name: str) -> tuple[MultiModalKwargsItem, int]:
        # The reference pads to its whole window of minutes, and throws the padding's frames away.  A second
        # of silence behind the end gives the same frames to the last bit.
        longest = {"audio_kwargs": {"max_length": len(samples) + self.sampling_rate}}
        return self._process("audio", (samples, self.sampling_rate), longest, name)

    def _process(
        self, kind: MediaKind, item: Any, options: dict[str, Any], name: str
    ) -> tuple[MultiModalKwargsItem, int]:
        """The encoder's input for one item, and the number of its tokens."""
        try:
            with self._one_at_a_time:
                items = self._processor.info.parse_mm_data({kind: [item]})
                # A name in place of the hash that vLLM would compute of every sample and pixel.
                inputs = ProcessorInputs(
                    [self.marks.placeholders[kind]], items, {kind: [name]}, hf_processor_mm_kwargs=options
                )
                result = self._processor.apply(inputs, _NO_TIMING)
        except ValueError as error:
            # vLLM's own words may hold the whole array; those of the checkpoint's processor lie below them.
            reason = str(error.__cause__)[:200] if error.__cause__ else "it is too short"
            raise MediaError(f"{name}: the model cannot take it: {reason}") from error
        return result["mm_kwargs"][kind][0], len(result["prompt_token_ids"])


def window_of(data: MultiModalKwargsItem, piece: torch.Tensor, tokens: int) -> Features:
    """A window of a recording: some of its mel frames ``[bins, frames]``, and how many tokens they are."""
    mel = piece.contiguous()
    hasher = hashlib.sha256(repr(tuple(mel.shape)).encode())
    # As bytes: NumPy has no bfloat16.
    hasher.update(mel.view(torch.uint8).numpy().data)
    changed = {FRAMES: mel, LENGTH: torch.full_like(data[LENGTH].data, mel.shape[1])}
    return Features(f"audio.{hasher.hexdigest()}", "audio", with_tensors(data, changed), tokens)


def with_tensors(data: MultiModalKwargsItem, changed: Mapping[str, torch.Tensor]) -> MultiModalKwargsItem:
    """The encoder's input with other tensors."""
    elements = {name: replace(data[name], data=tensor) for name, tensor in changed.items()}
    return MultiModalKwargsItem({**data, **elements})


def alternating(
    video: MultiModalKwargsItem, frames: Pixels, windows: Sequence[Features], clock: Clock
) -> Iterator[Piece]:
    """Cut a video whose sound is heard where windows of the sound end.

    The encoders look no further than a temporal patch and a window, so they give the same for the parts.
    ``frames`` are those of which the encoder's input was made.
    """
    grid = Grid.of(video[GRID].data.tolist(), float(video[SECONDS].data), clock)
    ends = [0, *accumulate(window.tokens for window in windows)]
    for part in _cut(clock.interleave(grid, ends[-1]), ends):
        seen = [run for run in part if run[0] == "video"]
        heard = [run for run in part if run[0] == "audio"]
        features = []
        if seen:
            features.append(_seen(video, frames, grid, seen[0][1], seen[-1][2]))
        if heard:
            features.append(_joined(windows[ends.index(heard[0][1]) : ends.index(heard[-1][2])]))
        yield Piece(tuple(features), tuple((kind, last - first) for kind, first, last in part))


def _cut(runs: Iterable[Run], ends: Sequence[int]) -> Iterator[list[Run]]:
    part: list[Run] = []
    for run in runs:
        part.append(run)
        if run[0] == "audio" and run[2] in ends:
            yield part
            part = []
    if part:
        yield part


def _seen(video: MultiModalKwargsItem, frames: Pixels, grid: Grid, first: int, last: int) -> Features:
    """Some tokens of a video, whole temporal patches; named by their frames and the size of their grid."""
    times, rows, columns = video[GRID].data.tolist()
    begin, end = (token // (grid.height * grid.width) for token in (first, last))
    of_patch = len(frames) // times
    shape = torch.tensor([end - begin, rows, columns])
    hasher = hashlib.sha256(repr((shape.tolist(), frames.shape[1:])).encode())
    hasher.update(np.ascontiguousarray(frames[begin * of_patch : end * of_patch]).data)
    changed = {PIXELS: video[PIXELS].data[begin * rows * columns : end * rows * columns], GRID: shape}
    return Features(f"video.{hasher.hexdigest()}", "video", with_tensors(video, changed), last - first)


def _joined(windows: Sequence[Features]) -> Features:
    mel = torch.cat([window.data[FRAMES].data for window in windows], dim=1)
    return window_of(windows[0].data, mel, sum(window.tokens for window in windows))


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


@dataclass(frozen=True)
class QwenMediaItem:
    """An item of a request; equal digests have equal features, see :meth:`FeatureExtractor.extract`."""

    digest: str
    pieces: tuple[Piece, ...]

    @property
    def features(self) -> list[Features]:
        """Those of all pieces."""
        return [features for piece in self.pieces for features in piece.features]

    @property
    def tokens(self) -> int:
        """Tokens that it is in the prompt."""
        return sum(features.tokens for features in self.features)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(features.nbytes for features in self.features)


def lay_out(prompt: Sequence[int], items: Sequence[QwenMediaItem], marks: Marks) -> MultiModalInput:
    """The engine's input for a prompt with one placeholder for each item, in their order."""
    waiting = iter(items)
    placeholders = set(marks.placeholders.values())
    laid = _Layout()
    for token in prompt:
        if token not in placeholders:
            laid.token_ids.append(token)
            continue
        item = next(waiting)
        # A video whose sound is heard has the marks of both.
        heard = token == marks.placeholders["video"] and any(each.kind == "audio" for each in item.features)
        laid.token_ids += [marks.audio_begin] * heard
        for piece in item.pieces:
            laid.add(piece, marks)
        laid.token_ids += [marks.audio_end] * heard
    return laid.as_input()


@dataclass
class _Layout:
    """A prompt in the making."""

    token_ids: list[int] = field(default_factory=list)
    data: dict[str, list[MultiModalKwargsItem]] = field(default_factory=dict)
    hashes: dict[str, list[str]] = field(default_factory=dict)
    ranges: dict[str, list[PlaceholderRange]] = field(default_factory=dict)

    def add(self, piece: Piece, marks: Marks) -> None:
        """Pictures and sound have one range, and say which of its tokens are theirs, as vLLM has it."""
        offset = len(self.token_ids)
        for kind, count in piece.runs:
            self.token_ids += [marks.placeholders[kind]] * count
        tokens = torch.tensor(self.token_ids[offset:])
        for features in piece.features:
            own = None if len(piece.features) == 1 else tokens == marks.placeholders[features.kind]
            self.data.setdefault(features.kind, []).append(features.data)
            # vLLM tells blocks within a range apart by one of the names there, so each is of all.
            names = [features.digest, *(each.digest for each in piece.features if each is not features)]
            self.hashes.setdefault(features.kind, []).append("+".join(names))
            place = PlaceholderRange(offset=offset, length=len(tokens), is_embed=own)
            self.ranges.setdefault(features.kind, []).append(place)

    def as_input(self) -> MultiModalInput:
        return mm_input(self.token_ids, MultiModalKwargsItems(self.data), self.hashes, self.ranges)
