"""The rules of media: what both families share, as Qwen2.5-Omni has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import (
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from services.families.qwen_media.features import FeatureExtractor, Features, Piece
from services.families.qwen_media.spans import Marks
from services.thinker.media.decoded import Decoded
from services.thinker.media.rules import FrameSampling
from shared.messages import MediaKind


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


class QwenMedia:
    """See :class:`services.thinker.media.rules.MediaRules`."""

    def __init__(self, extractor: FeatureExtractor) -> None:
        self._extractor = extractor
        self.placeholders: Mapping[MediaKind, int] = extractor.marks.placeholders
        self.sampling_rate: int = extractor.sampling_rate
        self.longest_audio_s: float = extractor.longest_audio_s
        self.sampling: FrameSampling = extractor.sampling
        self.clock: Final = extractor.clock

    def prepare(self, digest: str, decoded: Decoded, name: str) -> QwenMediaItem:
        """Compute the encoders' input of an item."""
        return QwenMediaItem(digest, self._extractor.extract(digest, decoded, name))

    def settled(self, item: QwenMediaItem) -> QwenMediaItem:
        """The first pieces of what is recorded, which what follows does not change, unless it is louder."""
        return QwenMediaItem(item.digest, self._extractor.windows.settled(item.pieces))

    def lay_out(self, prompt: Sequence[int], items: Sequence[QwenMediaItem]) -> MultiModalInput:
        """Replace each placeholder of a prompt by the tokens of its item."""
        return lay_out(prompt, items, self._extractor.marks)
