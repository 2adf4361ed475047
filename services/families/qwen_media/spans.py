"""Where media stand in the thinker's prompt: the order of their tokens and their M-RoPE position ids.

The rules are those of transformers' ``Qwen2_5OmniProcessor`` (tokens) and of ``get_rope_index`` of its
``Qwen2_5OmniPreTrainedModelForConditionalGeneration`` (positions).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Literal, Self

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec

from omnirelay.errors import StageFailedError
from services.thinker.media.rules import Positions
from shared.messages import MEDIA_KINDS, MediaKind

GRID: Final = "video_grid_thw"
SECONDS: Final = "second_per_grid_ts"
"""Names of vLLM for a video's temporal patches, rows and columns, and for the duration of a patch."""


@dataclass(frozen=True)
class Clock:
    """How time becomes position ids."""

    positions_per_second: float  # Of sound as of video
    chunk: int  # Position ids of the unit in which the sound and the frames of a video alternate
    merge: int  # Patches that become one token, along each side

    @classmethod
    def of(cls, thinker_config: Any) -> Self:
        """The clock that a checkpoint's ``thinker_config`` describes."""
        per_second = float(thinker_config.position_id_per_seconds)
        return cls(
            positions_per_second=per_second,
            chunk=int(per_second * thinker_config.seconds_per_chunk),
            merge=int(thinker_config.vision_config.spatial_merge_size),
        )

    def interleave(self, grid: "Grid", audio_tokens: int) -> Iterator["Run"]:
        """The order of the tokens of a video whose sound is heard: chunk by chunk, pictures first."""
        video = _chunks(grid.token_times.tolist(), self.chunk)
        audio = _chunks(range(audio_tokens), self.chunk)
        for pictures, sound in zip_longest(video, audio):
            if pictures is not None:
                yield "video", *pictures
            if sound is not None:
                yield "audio", *sound

    def marks(self, start: int) -> Positions:
        """Position ids of the two marks before, or behind, a video whose sound is heard: they share one."""
        return np.full((3, 2), start)


@dataclass(frozen=True)
class Grid:
    """Tokens of a picture or a video: ``height`` rows of ``width`` for each temporal patch's position id."""

    times: tuple[int, ...]
    height: int
    width: int

    @classmethod
    def of(cls, patches: Sequence[int], seconds_per_grid: float, clock: Clock) -> Self:
        """The grid of ``patches`` (temporal, rows, columns), each temporal one as long as told."""
        step = np.float32(seconds_per_grid)
        times = (np.arange(patches[0], dtype=np.float32) * step * clock.positions_per_second).astype(np.int64)
        return cls(tuple(times.tolist()), patches[1] // clock.merge, patches[2] // clock.merge)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.times) * self.height * self.width

    @property
    def token_times(self) -> Positions:
        """Temporal position id of each token, ``[tokens]``."""
        return np.repeat(np.asarray(self.times, dtype=np.int64), self.height * self.width)

    def positions(self, start: int) -> Positions:
        """Position ids ``[3, tokens]``: time, row and column, all counted from ``start``."""
        rows = np.repeat(np.arange(self.height), self.width)
        columns = np.tile(np.arange(self.width), self.height)
        frames = len(self.times)
        return np.stack([self.token_times, np.tile(rows, frames), np.tile(columns, frames)]) + start


@dataclass(frozen=True)
class VisualSpan:
    """Tokens of a picture or video in the prompt, and of the sound that alternates with them, if heard."""

    offset: int
    grid: Grid
    audio_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens, of both."""
        return self.grid.tokens + (self.audio_tokens or 0)


Run = tuple[Literal["video", "audio"], int, int]
"""Consecutive tokens of one kind: the index of the first among its kind, and that behind the last."""


def mrope_positions(length: int, spans: Iterable[VisualSpan], clock: Clock) -> Positions:
    """M-RoPE position ids int64 ``[3, length]`` of a prompt with these spans; sound alone is like text."""
    pieces: list[Positions] = []
    done = 0
    for span in spans:
        if span.audio_tokens is None:
            pieces.append(text_positions(span.offset - done, _next(pieces)))
            pieces.append(span.grid.positions(_next(pieces)))
            done = span.offset + span.tokens
        else:
            # One mark of both pairs is a token beyond the span.
            pieces.append(text_positions(span.offset - 2 - done, _next(pieces)))
            pieces.append(clock.marks(_next(pieces)))
            start = _next(pieces)
            of_kind = {"video": span.grid.positions(start), "audio": text_positions(span.audio_tokens, start)}
            for kind, first, last in clock.interleave(span.grid, span.audio_tokens):
                pieces.append(of_kind[kind][:, first:last])
            pieces.append(clock.marks(_next(pieces)))
            done = span.offset + span.tokens + 2
    # A prompt may end within a video that goes on.
    pieces.append(text_positions(max(0, length - done), _next(pieces)))
    return np.concatenate(pieces, axis=1)[:, :length]


def text_positions(count: int, start: int) -> Positions:
    """Position ids of text, ``[3, count]``."""
    return np.broadcast_to(np.arange(start, start + count, dtype=np.int64), (3, count))


def _next(pieces: Sequence[Positions]) -> int:
    """What follows the last piece, as the reference has it: the largest id of that piece, plus one."""
    last = next((piece for piece in reversed(pieces) if piece.size), None)
    return 0 if last is None else int(last.max()) + 1


def _chunks(times: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """Cut ascending times where the next multiple of ``width`` is reached (``get_chunked_index``)."""
    start = 0
    limit = width
    for index, time in enumerate(times):
        if time >= limit:
            yield start, index
            start = index
            limit += width
    yield start, len(times)


@dataclass(frozen=True)
class Marks:
    """Ids of the checkpoint's tokens that stand for media, and those before and behind sound."""

    placeholders: dict[MediaKind, int]
    audio_begin: int
    audio_end: int

    @classmethod
    def of(cls, thinker_config: Any, name: str) -> Self:
        """The tokens that ``thinker_config`` names; placeholders have keys like ``name``, ``{}_token_id``."""
        return cls(
            placeholders={kind: getattr(thinker_config, name.format(kind)) for kind in MEDIA_KINDS},
            audio_begin=thinker_config.audio_start_token_id,
            audio_end=thinker_config.audio_end_token_id,
        )


def prompt_positions(length: int, features: Sequence[MultiModalFeatureSpec], clock: Clock) -> Positions:
    """M-RoPE position ids int64 ``[3, length]`` of a prompt, by the engine's features of all its media.

    vLLM's own differ from the reference's where the sound of a video is heard.  Raises
    StageFailedError if the engine no longer has the features of a picture or video.
    """
    spans, behind = list[list[MultiModalFeatureSpec]](), -1
    for feature in sorted(features, key=lambda each: each.mm_position.offset):
        # Parts of a video whose sound is heard have nothing between them; others have marks around them.
        if feature.mm_position.offset > behind:
            spans.append([])
        spans[-1].append(feature)
        behind = feature.mm_position.offset + feature.mm_position.length
    return mrope_positions(length, filter(None, (_visual_span(span, clock) for span in spans)), clock)


def _visual_span(parts: Sequence[MultiModalFeatureSpec], clock: Clock) -> VisualSpan | None:
    """What the parts are together; None for sound alone."""
    seen = [part for part in parts if part.modality != "audio"]
    if not seen:
        return None
    heard = sum(part.mm_position.get_num_embeds() for part in parts if part.modality == "audio")
    return VisualSpan(parts[0].mm_position.offset, _grid(seen, clock), heard or None)


def engine_positions(
    tokens: list[int], features: Sequence[MultiModalFeatureSpec], clock: Clock
) -> tuple[torch.Tensor, int]:
    """M-RoPE ids int64 ``[3, n]`` as vLLM asks for them, and what a token behind adds to its index."""
    # As transformers generates: a reply counts on from the prompt's last token, as text of the prompt would.
    positions = torch.from_numpy(prompt_positions(len(tokens), features, clock))
    return positions, int(positions[:, -1].max()) + 1 - len(tokens)


def _grid(parts: Sequence[MultiModalFeatureSpec], clock: Clock) -> Grid:
    """The grid of a picture or a video, from what its encoder is given in parts."""
    found = [part.data for part in parts if part.data is not None]
    if len(found) < len(parts):
        raise StageFailedError("the engine has lost the features of an item")
    if parts[0].modality == "image":
        return Grid.of(found[0]["image_grid_thw"].data.tolist(), 0.0, clock)
    _, rows, columns = found[0][GRID].data.tolist()
    times = sum(int(each[GRID].data[0]) for each in found)
    return Grid.of((times, rows, columns), float(found[0][SECONDS].data), clock)
