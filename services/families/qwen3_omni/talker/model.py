"""The talker: a mixture-of-experts decoder over codec frames, which draws one codebook of each itself."""

import copy
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.sequence import IntermediateTensors

from services.families.qwen3_omni.talker.predictor import CodePredictor
from services.families.rotary import StepRotary, interleaved
from shared.vllm.conditioning import ConditioningStore

SUPPRESSED = 1024
"""So many of the largest ids are not drawn, but for the end of the speech (reference: ``generate``)."""


class FrameTalker(nn.Module):
    """Frames of codec tokens in, the logits of the next frame's first id out.

    The input of a position is its row, which the thinker has projected, and the embeddings of its codec
    ids: of all codebooks at a frame, of one id in the prompt, of none at the token that stands for text.

    Reference: transformers' ``Qwen3OmniMoeTalkerForConditionalGeneration``.
    """

    hf_to_vllm_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "code2wav.": None,
            "talker.text_projection.": None,
            "talker.hidden_projection.": None,
            "talker.code_predictor.": "code_predictor.",
            "talker.codec_head.": "codec_head.",
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.model.": "model.",
        }
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    inputs: torch.Tensor
    undrawable: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        del prefix
        config = self.config = vllm_config.model_config.hf_config
        most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.model = Qwen3MoeModel(
            vllm_config=vllm_config.with_hf_config(
                copy.deepcopy(config), architectures=["Qwen3MoeForCausalLM"]
            ),
            prefix="model",
        )
        axes = interleaved(config.talker_mrope_section, config.head_dim // 2)
        self.rotary = StepRotary(config.head_dim, config.rope_parameters["rope_theta"], axes, most_tokens)
        for layer in self.model.layers:
            layer.self_attn.rotary_emb = self.rotary
        self.code_predictor = CodePredictor(config.code_predictor, vllm_config.scheduler_config.max_num_seqs)
        self.codec_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        further = self.code_predictor.further
        self.conditioning = ConditioningStore(
            config.hidden_size, config.num_hidden_layers, vllm_config.cache_config, further
        )
        # What goes into the decoder is at the same place in each step: captured CUDA graphs read it there.
        self.register_buffer("inputs", torch.zeros(most_tokens, config.hidden_size), persistent=False)
        undrawable = torch.arange(config.vocab_size) >= config.vocab_size - SUPPRESSED
        undrawable[config.codec_eos_token_id] = False
        self.register_buffer("undrawable", undrawable, persistent=False)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Embeddings ``[n, hidden]`` of first ids; zero for the token that stands for text alone."""
        alone = (input_ids == self.config.text_alone_id).unsqueeze(-1)
        return self.model.embed_tokens(input_ids).masked_fill(alone, 0)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,  # noqa: ARG002 - part of vLLM's interface
        **_: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Last hidden states ``[n, hidden]`` of first ids ``[n]``."""
        embeds = self.embed_input_ids(input_ids)
        conditioning = self.conditioning.read_batch(input_ids.shape[0])
        if conditioning is None:
            # Only while vLLM measures memory: the rows bring their own positions.
            position_ids = positions.expand(3, -1)
        else:
            rows, ids = conditioning
            position_ids, further = ids[:3], ids[3:]
            # Special ids in the prompt are no frames.
            is_frame = (input_ids < self.config.vocab_size - SUPPRESSED).unsqueeze(-1)
            embeds = embeds + self.code_predictor.embed(further.T) * is_frame + rows
        inputs = self.inputs[: input_ids.shape[0]]
        inputs.copy_(embeds)
        return self.model(None, self.rotary.begin(position_ids), intermediate_tensors, inputs)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits ``[n, vocabulary]`` of the first id, of which only codes and the end can be drawn."""
        logits: torch.Tensor | None = self.logits_processor(self.codec_head, hidden_states)
        if logits is not None:
            logits.masked_fill_(self.undrawable, float("-inf"))
        return logits

    def further_codes(self, hidden: torch.Tensor, codes: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Complete frames, see :class:`services.talker.family.TalkerModel`."""
        found: torch.Tensor = self.code_predictor(hidden, self.model.embed_tokens(codes), draws)
        return found

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker's part of the checkpoint, without the projections, which are the thinker's."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
