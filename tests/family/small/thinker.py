"""The thinker of the small family."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from vllm.inputs import MultiModalInput
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.multimodal.inputs import MultiModalFeatureSpec

from omnirelay.errors import InvalidRequestError
from services.thinker.family import SpeechEmbeddings, ThinkerFamily
from services.thinker.media.decoded import Decoded
from services.thinker.media.rules import FrameSampling, Positions, PreparedItem
from services.thinker.speaking import SpeakingModel
from shared.messages import ConditioningRows, MediaKind
from shared.vllm.tensors import pack_positions, pack_rows
from tests.family.small.config import RATE, VOICES, SmallOmniConfig


class SmallThinker(SpeakingModel, Qwen2ForCausalLM):
    """A Qwen2 decoder whose rows are ``[embedding, hidden state]``."""

    @staticmethod
    def row_width(hidden_size: int) -> int:
        return 2 * hidden_size

    @staticmethod
    def row_of(hidden: torch.Tensor, embeds: torch.Tensor, is_text: torch.Tensor) -> torch.Tensor:
        return torch.cat([embeds * is_text, hidden], dim=-1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        mapper = WeightsMapper(orig_to_new_prefix={"talker.": None, "vocoder.": None, "thinker.": ""})
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=mapper)
        return loaded


class NoMedia:
    """The rules of a family that takes text alone."""

    def __init__(self) -> None:
        self.placeholders: Mapping[MediaKind, int] = {}
        self.sampling_rate = 16_000
        self.longest_audio_s = 1.0
        self.sampling = FrameSampling(1.0, 1, 1, 1)

    def prepare(self, digest: str, decoded: Decoded, name: str) -> PreparedItem:  # noqa: ARG002 - the protocol's
        raise InvalidRequestError(f"{name}: this model takes text alone")

    def settled(self, item: Any) -> PreparedItem:  # noqa: ARG002 - as above
        raise InvalidRequestError("this model takes text alone")

    def lay_out(self, prompt: Sequence[int], items: Sequence[Any]) -> MultiModalInput:  # noqa: ARG002 - as above
        raise InvalidRequestError("this model takes text alone")

    def positions(self, length: int, features: Sequence[MultiModalFeatureSpec]) -> Positions:  # noqa: ARG002
        return np.broadcast_to(np.arange(length, dtype=np.int64), (3, length))


class SmallTrack:
    """The prompt's rows, the voice's, the reply's, and one that closes the track; positions run on by one."""

    def __init__(
        self, request_id: str, prompt_tokens: int, voice: torch.Tensor, closing: torch.Tensor
    ) -> None:
        self.request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._voice, self._closing = voice, closing
        self._seq = self._written = 0

    def rows(self, start: int, rows: torch.Tensor, positions: torch.Tensor) -> ConditioningRows:
        del positions
        in_prompt = max(0, min(self._prompt_tokens - start, rows.shape[0]))
        parts = [rows[:in_prompt], rows[in_prompt:]]
        if in_prompt and start + in_prompt == self._prompt_tokens:
            parts.insert(1, self._voice.unsqueeze(0))
        return self._message(torch.cat(parts), last=False)

    def close(self) -> ConditioningRows:
        return self._message(self._closing, last=True)

    def _message(self, rows: torch.Tensor, last: bool) -> ConditioningRows:
        start, count = self._written, rows.shape[0]
        message = ConditioningRows(
            request_id=self.request_id,
            seq=self._seq,
            start=start,
            rows=pack_rows(rows),
            additional=pack_positions(torch.arange(start, start + count).expand(3, -1)),
            last=last,
        )
        self._seq += 1
        self._written += count
        return message


def read_embeddings(
    config: SmallOmniConfig, _: Path, embed: Callable[[list[int]], torch.Tensor]
) -> SpeechEmbeddings:
    embeds = embed([int(config.eos_token_id), *VOICES.values()])
    rows = torch.cat([embeds, torch.zeros_like(embeds)], dim=-1)
    return SpeechEmbeddings(voices=dict(zip(VOICES, rows[1:], strict=True)), closing=rows[:1])


def end_tokens(config: Any) -> list[int]:
    return [config.eos_token_id]


THINKER: Final = ThinkerFamily(
    architecture="SmallThinker",
    model=SmallThinker,
    end_tokens=end_tokens,
    read_embeddings=read_embeddings,
    track=SmallTrack,
    rows_per_s=RATE,
    media=lambda *_: NoMedia(),
)
