"""What talkers have in common: a decoder over codec frames, and its M-RoPE.

The angles of M-RoPE are computed once a step, for all layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.sequence import IntermediateTensors

from omnirelay.errors import CheckpointError
from shared.vllm.conditioning import ConditioningStore


class StepRotary(RotaryEmbedding):
    """vLLM's plain rotary embedding over a table that has a row for each token of the step.

    vLLM's own M-RoPE puts the angles of the three axes together in every layer, which takes as long as the
    attention on a CPU.  Here each row holds the angles of its token's three position ids, and the layers see
    plain positions: 0 to n.  Table and positions are buffers: compiled code and CUDA graphs find them where
    they were.  ``axes`` has the axis of each frequency: :func:`in_sections` or :func:`interleaved`.

    Reference: transformers' ``Qwen2_5OmniRotaryEmbedding``, ``Qwen3OmniMoeTalkerRotaryEmbedding``.
    """

    axes: torch.Tensor
    inverse_frequencies: torch.Tensor
    rows: torch.Tensor

    def __init__(self, head_size: int, base: float, axes: Sequence[int], most_tokens: int) -> None:
        dtype = torch.get_default_dtype()
        super().__init__(head_size, head_size, most_tokens, base, True, dtype, init_cache=False)
        buffers: dict[str, Any] = {
            "cos_sin_cache": torch.zeros(most_tokens, head_size, dtype=dtype),
            "axes": torch.tensor(axes),
            "inverse_frequencies": self._compute_inv_freq(base),
            "rows": torch.arange(most_tokens),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def begin(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Fill the table by a step's M-RoPE ids ``[3, n]``; gives int64 positions ``[n]`` for its layers."""
        count, pairs = position_ids.shape[1], self.inverse_frequencies.shape[0]
        angles = position_ids.to(torch.float32)[self.axes].T * self.inverse_frequencies
        self.cos_sin_cache[:count, :pairs] = angles.cos()
        self.cos_sin_cache[:count, pairs:] = angles.sin()
        return self.rows[:count]


_OF_MROPE = ("mrope_section", "mrope_interleaved", "interleaved")
"""Taken out before vLLM sees them: it would compute positions of media of its own."""


def default_rope(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A talker's rope parameters without its M-RoPE; raises CheckpointError if they scale."""
    rope = {name: value for name, value in (parameters or {}).items() if name not in _OF_MROPE}
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(
            f"config.json: the rope_type of talker_config is {rope.get('rope_type')!r}, not 'default'"
        )
    return rope


def in_sections(sections: Sequence[int]) -> list[int]:
    """The axis of each frequency, where the frequencies of an axis are beside each other."""
    return [axis for axis, count in enumerate(sections) for _ in range(count)]


def interleaved(sections: Sequence[int], frequencies: int) -> list[int]:
    """The axis of each frequency, where the axes alternate as long as each has frequencies left."""
    return [place % 3 if place < 3 * sections[place % 3] else 0 for place in range(frequencies)]


class CodecDecoder(nn.Module):
    """Codec tokens in, codec logits out; the conditioning row of each position is read from paged KV memory.

    ``axes`` are those of :class:`StepRotary`, ``undrawable`` bool ``[vocabulary]`` the ids that are never
    drawn; ``silent_id`` stands where a position has no codec id.  Rows have ``width`` elements.
    """

    hf_to_vllm_mapper: ClassVar[WeightsMapper]
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    inputs: torch.Tensor
    undrawable: torch.Tensor

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: Any,
        axes: Sequence[int],
        undrawable: torch.Tensor,
        silent_id: int,
        width: int,
        further_ids: int = 0,
    ) -> None:
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.model: Any = model
        self.rotary = StepRotary(config.head_dim, config.rope_parameters["rope_theta"], axes, most_tokens)
        for layer in model.layers:
            layer.self_attn.rotary_emb = self.rotary
        self.codec_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.conditioning = ConditioningStore(
            width, config.num_hidden_layers, vllm_config.cache_config, further_ids
        )
        self._silent_id = silent_id
        # What goes into the decoder is at the same place in each step: captured CUDA graphs read it there.
        self.register_buffer("inputs", torch.zeros(most_tokens, config.hidden_size), persistent=False)
        self.register_buffer("undrawable", undrawable, persistent=False)
        self.make_empty_intermediate_tensors = model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Embeddings ``[n, embedding_size]``; zero for the token that stands where there is no codec id."""
        silent = (input_ids == self._silent_id).unsqueeze(-1)
        return self.model.embed_tokens(input_ids).masked_fill(silent, 0)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,  # noqa: ARG002 - part of vLLM's interface
        **_: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Last hidden states ``[n, hidden]`` of codec ids ``[n]``."""
        conditioning = self.conditioning.read_batch(input_ids.shape[0])
        if conditioning is None:
            # Only while vLLM measures memory: the rows bring their own positions.
            embeds, ids = self.embed_input_ids(input_ids), positions.expand(3, -1)
        else:
            rows, ids = conditioning
            embeds = self.embed_frames(input_ids, ids[3:]) + rows
        inputs = self.inputs[: embeds.shape[0]]
        inputs.copy_(self.project(embeds))
        return self.model(None, self.rotary.begin(ids[:3]), intermediate_tensors, inputs)

    def project(self, embeds: torch.Tensor) -> torch.Tensor:
        """Make the decoder's input ``[n, hidden]`` of a sum of embeddings and rows."""
        return embeds

    def embed_frames(self, input_ids: torch.Tensor, further_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of frames with their further ids ``[groups - 1, n]``, here of none."""
        del further_ids
        return self.embed_input_ids(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Codec logits ``[n, vocabulary]``, of which only codes and end tokens can be drawn."""
        logits: torch.Tensor | None = self.logits_processor(self.codec_head, hidden_states)
        if logits is not None:
            logits.masked_fill_(self.undrawable, float("-inf"))
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker's part of the checkpoint."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
