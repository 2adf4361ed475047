"""The rules of media of Qwen2.5-Omni."""

from collections.abc import Mapping, Sequence
from typing import Final, Self

from vllm.inputs import MultiModalInput
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.engine.llm_engine import LLMEngine

from services.families.qwen2_5_omni.thinker.features import FeatureExtractor, settled
from services.families.qwen2_5_omni.thinker.layout import QwenMediaItem, lay_out
from services.families.qwen2_5_omni.thinker.marks import Marks
from services.families.qwen2_5_omni.thinker.positions import prompt_positions
from services.thinker.media.rules import Decoded, FrameSampling, Positions
from shared.config import MediaConfig
from shared.messages import MediaKind


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
        return QwenMediaItem(item.digest, settled(item.features, self._extractor.window_frames))

    def lay_out(self, prompt: Sequence[int], items: Sequence[QwenMediaItem]) -> MultiModalInput:
        """Replace each placeholder of a prompt by the tokens of its item."""
        return lay_out(prompt, items, self._marks, self.clock)

    def positions(self, length: int, features: Sequence[MultiModalFeatureSpec]) -> Positions:
        """M-RoPE position ids of a prompt."""
        return prompt_positions(length, features, self.clock)
