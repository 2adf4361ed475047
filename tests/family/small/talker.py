"""The talker of the small family."""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn
from transformers import Qwen2Config
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from omnirelay.status import CodecDefaults
from services.talker.family import CodecSpec, SpeechRules, TalkerFamily
from shared.vllm.conditioning import ConditioningStore
from tests.family.small.config import (
    BLOCK_FRAMES,
    CODES,
    END,
    HIDDEN,
    MASK,
    SAMPLES_PER_FRAME,
    SmallOmniConfig,
)


class SmallTalker(nn.Module):
    """``project(row) + embedding of the frame before`` in, the first id of the next frame out."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        del prefix
        config = vllm_config.model_config.hf_config
        self.model = Qwen2Model(vllm_config=vllm_config, prefix="model")
        self.project = ReplicatedLinear(2 * HIDDEN, HIDDEN, bias=False, return_bias=False)
        self.head = ParallelLMHead(config.vocab_size, HIDDEN)
        self.further_embed = nn.Embedding(CODES, HIDDEN)
        self.further_head = nn.Linear(HIDDEN, CODES, bias=False)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.conditioning = ConditioningStore(
            2 * HIDDEN, config.num_hidden_layers, vllm_config.cache_config, further_ids=1
        )
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embeds: torch.Tensor = self.model.embed_tokens(input_ids)
        return embeds

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        del inputs_embeds
        inputs = self.embed_input_ids(input_ids)
        held = self.conditioning.read_batch(input_ids.shape[0])
        if held is not None:
            rows, ids = held
            frames = (inputs + self.further_embed(ids[3])).masked_fill((input_ids == MASK).unsqueeze(-1), 0)
            inputs = frames + self.project(rows)
        hidden: torch.Tensor = self.model(None, positions, intermediate_tensors, inputs)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits: torch.Tensor | None = self.logits_processor(self.head, hidden_states)
        if logits is not None:
            logits[:, MASK:] = float("-inf")
        return logits

    def further_codes(self, hidden: torch.Tensor, codes: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        del draws
        chosen: torch.Tensor = self.further_head(hidden + self.embed_input_ids(codes)).argmax(
            -1, keepdim=True
        )
        return chosen

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        mapper = WeightsMapper(orig_to_new_prefix={"thinker.": None, "vocoder.": None, "talker.": ""})
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=mapper)
        return loaded


def talker_config(config: Any) -> Any:
    if not isinstance(config, SmallOmniConfig):
        return config
    return Qwen2Config(**config.talker, architectures=["SmallTalker"], dtype=config.dtype)


def speech_rules(_: Any) -> SpeechRules:
    return SpeechRules(
        row_width=2 * HIDDEN,
        start_positions=1,
        prompt=lambda length, _: [MASK] * (length + 1),
        end_tokens=[END],
        codec=CodecSpec(frame_samples=SAMPLES_PER_FRAME, groups=2, ids=CODES, codes_per_message=BLOCK_FRAMES),
        defaults=CodecDefaults(),
    )


TALKER: Final = TalkerFamily(
    architecture="SmallTalker", model=SmallTalker, config=talker_config, speech=speech_rules
)
