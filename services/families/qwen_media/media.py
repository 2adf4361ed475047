"""The rules of media: what both families share, as Qwen2.5-Omni has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import torch
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import InvalidRequestError
from services.families.qwen_media.features import FeatureExtractor, Features
from services.families.qwen_media.spans import Clock, Marks, prompt_positions
from services.thinker.media.decoded import Decoded
from services.thinker.media.rules import FrameSampling, Positions
from shared.config import MediaConfig
from shared.messages import MediaKind


@dataclass(frozen=True)
class QwenMediaItem:
    """An item of a request; equal digests have equal features, see :meth:`FeatureExtractor.extract`."""

    digest: str
    features: tuple[Features, ...]

    @property
    def tokens(self) -> int:
        """Tokens that it is in the prompt."""
        return sum(features.tokens for features in self.features)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(features.nbytes for features in self.features)


def lay_out(
    prompt: Sequence[int], items: Sequence[QwenMediaItem], marks: Marks, clock: Clock
) -> MultiModalInput:
    """The engine's input for a prompt with one placeholder for each item, in their order."""
    waiting = iter(items)
    placeholders = set(marks.placeholders.values())
    laid = _Layout()
    for token in prompt:
        if token not in placeholders:
            laid.token_ids.append(token)
            continue
        item = next(waiting)
        if token == marks.placeholders["video"] and len(item.features) == 2:
            pictures, sound = item.features
            laid.token_ids.append(marks.audio_begin)
            laid.add_alternating(pictures, sound, marks, clock)
            laid.token_ids.append(marks.audio_end)
        else:
            for features in item.features:
                laid.add(features, token)
    return laid.as_input()


@dataclass
class _Layout:
    """A prompt in the making."""

    token_ids: list[int] = field(default_factory=list)
    data: dict[str, list[MultiModalKwargsItem]] = field(default_factory=dict)
    hashes: dict[str, list[str]] = field(default_factory=dict)
    ranges: dict[str, list[PlaceholderRange]] = field(default_factory=dict)

    def add(self, features: Features, token: int) -> None:
        self._note(features, PlaceholderRange(offset=len(self.token_ids), length=features.tokens))
        self.token_ids += [token] * features.tokens

    def add_alternating(self, pictures: Features, sound: Features, marks: Marks, clock: Clock) -> None:
        """Both items have one range, and say which of its tokens are theirs, as vLLM has it."""
        if pictures.grid is None:
            raise InvalidRequestError("a video has no pictures")
        offset = len(self.token_ids)
        for kind, first, last in clock.interleave(pictures.grid, sound.tokens):
            self.token_ids += [marks.placeholders[kind]] * (last - first)
        tokens = torch.tensor(self.token_ids[offset:])
        for features in (pictures, sound):
            own = tokens == marks.placeholders[features.kind]
            self._note(features, PlaceholderRange(offset=offset, length=len(tokens), is_embed=own))

    def as_input(self) -> MultiModalInput:
        return mm_input(self.token_ids, MultiModalKwargsItems(self.data), self.hashes, self.ranges)

    def _note(self, features: Features, place: PlaceholderRange) -> None:
        self.data.setdefault(features.kind, []).append(features.data)
        self.hashes.setdefault(features.kind, []).append(features.digest)
        self.ranges.setdefault(features.kind, []).append(place)


class QwenMedia:
    """See :class:`services.thinker.media.rules.MediaRules`."""

    def __init__(self, extractor: FeatureExtractor, marks: Marks) -> None:
        self._extractor = extractor
        self._marks = marks
        self.placeholders: Mapping[MediaKind, int] = marks.placeholders
        self.sampling_rate: int = extractor.sampling_rate
        self.longest_audio_s: float = extractor.longest_audio_s
        self.sampling: FrameSampling = extractor.sampling
        self.clock: Final = extractor.clock

    @classmethod
    def of(cls, engine: LLMEngine, media: MediaConfig) -> Self:
        """The rules of an engine's checkpoint."""
        marks = Marks.of(engine.model_config.hf_config.thinker_config)
        return cls(FeatureExtractor(engine, marks, media.audio_clamp), marks)

    def prepare(self, digest: str, decoded: Decoded, name: str) -> QwenMediaItem:
        """Compute the encoders' input of an item."""
        return QwenMediaItem(digest, self._extractor.extract(digest, decoded, name))

    def settled(self, item: QwenMediaItem) -> QwenMediaItem:
        """The windows of a recording that further audio does not change, unless it is louder."""
        return QwenMediaItem(item.digest, self._extractor.settled(item.features))

    def lay_out(self, prompt: Sequence[int], items: Sequence[QwenMediaItem]) -> MultiModalInput:
        """Replace each placeholder of a prompt by the tokens of its item."""
        return lay_out(prompt, items, self._marks, self.clock)

    def positions(self, length: int, features: Sequence[MultiModalFeatureSpec]) -> Positions:
        """M-RoPE position ids of a prompt."""
        return prompt_positions(length, features, self.clock)
