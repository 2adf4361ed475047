"""Decoded media to what the encoders take, by vLLM's multimodal processor."""

import threading
from dataclasses import dataclass
from typing import Any, Final

import torch
from PIL import Image
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import MediaError
from services.families.qwen2_5_omni.thinker.marks import Marks
from services.families.qwen2_5_omni.thinker.spans import Clock, Grid
from services.thinker.media.decoded import DecodedAudio, DecodedImage, DecodedVideo, Samples
from services.thinker.media.rules import FrameSampling
from shared.messages import MediaKind

_NO_TIMING: Final = TimingContext(enabled=False)


@dataclass(frozen=True)
class Features:
    """One item, ready for its encoder.

    Attributes:
        kind: Which encoder.
        data: The encoder's input, as vLLM names it.
        tokens: Tokens that it is in the prompt.
        grid: How they are laid out; none for sound.
    """

    kind: MediaKind
    data: MultiModalKwargsItem
    tokens: int
    grid: Grid | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        tensors = (element.data for element in self.data.values())
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


class FeatureExtractor:
    """Runs the checkpoint's processors on one item at a time; safe to use from any thread.

    Args:
        engine: The thinker's engine.
        marks: The checkpoint's tokens for media.
    """

    def __init__(self, engine: LLMEngine, marks: Marks) -> None:
        self._marks = marks
        self._processor: Any = engine.input_processor.renderer.get_mm_processor()
        self._one_at_a_time = threading.Lock()
        self.clock: Final = Clock.of(engine.model_config.hf_config.thinker_config)
        extractor = self._processor.info.get_feature_extractor()
        self.sampling_rate: Final = int(extractor.sampling_rate)
        self.longest_audio_s: Final = float(extractor.chunk_length)
        videos = self._processor.info.get_hf_processor().video_processor
        self.sampling: Final = FrameSampling(
            # The checkpoints do not say; this is what Qwen2_5OmniProcessor supposes.
            frames_per_second=float(videos.fps or 2.0),
            min_frames=int(videos.min_frames),
            max_frames=int(videos.max_frames),
            temporal_patch_size=int(videos.temporal_patch_size),
        )

    def extract(self, decoded: DecodedAudio | DecodedImage | DecodedVideo, name: str) -> tuple[Features, ...]:
        """The features of an item; two for a video whose sound is heard, the pictures first.

        Args:
            decoded: The item.
            name: What to call it in an error.

        Raises:
            MediaError: The checkpoint's processor refuses it.
        """
        if isinstance(decoded, DecodedAudio):
            return (self._audio(decoded.samples, name),)
        if isinstance(decoded, DecodedImage):
            return (self._visual("image", Image.fromarray(decoded.pixels), name),)
        pictures = self._visual("video", decoded.frames, name)
        if decoded.audio is None:
            return (pictures,)
        return pictures, self._audio(decoded.audio, f"{name}'s sound")

    def _audio(self, samples: Samples, name: str) -> Features:
        # The reference pads to its whole window of minutes, and throws the padding's frames away.  A second
        # of silence behind the end gives the same frames to the last bit.
        longest = {"audio_kwargs": {"max_length": len(samples) + self.sampling_rate}}
        data, tokens = self._process("audio", (samples, self.sampling_rate), longest, name)
        return Features("audio", data, tokens)

    def _visual(self, kind: MediaKind, pictures: Any, name: str) -> Features:
        data, tokens = self._process(kind, pictures, {}, name)
        patches = data[f"{kind}_grid_thw"].data.tolist()
        seconds = float(data["second_per_grid_ts"].data) if kind == "video" else 0.0
        return Features(kind, data, tokens, Grid.of(patches, seconds, self.clock))

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
