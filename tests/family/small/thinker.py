"""The thinker of the small family."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.inputs import MultiModalInput
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.multimodal.inputs import MultiModalFeatureSpec

from omnirelay.errors import InvalidRequestError
from services.thinker.family import Embed, ThinkerFamily
from services.thinker.media.decoded import Decoded
from services.thinker.media.rules import FrameSampling, Positions, PreparedItem
from services.thinker.speaking import SpeakingModel
from shared.messages import ConditioningRows, MediaKind
from shared.vllm.tensors import pack_positions, pack_rows
from tests.family.small.config import HIDDEN, INNER_LAYER, RATE, VOICES, SmallOmniConfig


class SmallThinker(SpeakingModel, Qwen2ForCausalLM):
    """A Qwen2 decoder whose rows are ``[embedding, hidden state of an inner layer]``."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.set_aux_hidden_state_layers((INNER_LAYER,))

    @staticmethod
    def row_width(_: VllmConfig) -> int:
        return 2 * HIDDEN

    def row_of(self, hidden: torch.Tensor, embeds: torch.Tensor, is_text: torch.Tensor) -> torch.Tensor:
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
        self.prompt_rows = prompt_tokens
        self._voice, self._closing = voice, closing
        self._seq = self._written = 0

    def rows(self, start: int, rows: torch.Tensor, positions: torch.Tensor) -> ConditioningRows:
        del positions
        in_prompt = max(0, min(self.prompt_rows - start, rows.shape[0]))
        parts = [rows[:in_prompt], rows[in_prompt:]]
        if in_prompt and start + in_prompt == self.prompt_rows:
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


class SmallSpeech:
    """The rows of the voices and of the end."""

    voices = VOICES
    further_rows = 1

    def __init__(self, config: SmallOmniConfig, _: Path, embed: Embed) -> None:
        embeds = embed([int(config.eos_token_id), *VOICES.values()])
        self._rows = torch.cat([embeds, torch.zeros_like(embeds)], dim=-1)

    def track(self, request_id: str, prompt: Sequence[int], voice: str) -> SmallTrack:
        own = self._rows[1 + list(VOICES).index(voice)]
        return SmallTrack(request_id, len(prompt), own, self._rows[:1])


def end_tokens(config: Any) -> list[int]:
    return [config.eos_token_id]


THINKER: Final = ThinkerFamily(
    architecture="SmallThinker",
    model=SmallThinker,
    end_tokens=end_tokens,
    speech=SmallSpeech,
    rows_per_s=RATE,
    media=lambda *_: NoMedia(),
)
