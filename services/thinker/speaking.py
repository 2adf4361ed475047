"""A thinker's model that also keeps a conditioning row for each position, whatever its architecture."""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.sequence import IntermediateTensors

from shared.vllm.conditioning import ConditioningStore
from shared.vllm.transfer import to_device

# In the classes that derive from it, a vLLM model follows.
_Model: Any = nn.Module


class SpeakingModel(_Model):
    """Base class of thinkers, to be listed before the vLLM model that it extends.

    A family overrides :meth:`row_of` and, if rows are not as wide as hidden states, :meth:`row_width`.
    The tokens of a prompt may end with those of a reply that is computed again; see
    :func:`services.thinker.resume.prompt_length`.
    """

    step_embeds: torch.Tensor
    step_is_text: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        model = vllm_config.model_config
        text_config, hidden_size = model.hf_text_config, model.get_hidden_size()
        self.conditioning = ConditioningStore(
            self.row_width(vllm_config), text_config.num_hidden_layers, vllm_config.cache_config
        )
        # Buffers: vLLM computes embeddings outside the captured part of a step, which reads them here.
        most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        for name, width in (("step_embeds", hidden_size), ("step_is_text", 1)):
            buffer = torch.zeros(most_tokens, width, dtype=model.dtype)
            self.register_buffer(name, buffer, persistent=False)

    @staticmethod
    def row_width(vllm_config: VllmConfig) -> int:
        """Elements of a row."""
        width: int = vllm_config.model_config.get_hidden_size()
        return width

    def row_of(self, hidden: torch.Tensor, embeds: torch.Tensor, is_text: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, row_width]`` by hidden states and the first layer's input, ``[n, hidden]`` each.

        The hidden states are the last ones, or those of the first auxiliary layer if the model gives any.
        ``is_text`` ``[n, 1]`` of the model's dtype is 0 at positions of media, else 1.
        """
        raise NotImplementedError

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embed the tokens of a step ``[n]`` as ``[n, hidden]``, and note them for the rows."""
        count = input_ids.shape[0]
        if is_multimodal is None:
            embeds: torch.Tensor = super().embed_input_ids(input_ids)
            self.step_is_text[:count] = 1
        else:
            embeds = super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)
            # vLLM keeps it in pinned memory of the host.
            self.step_is_text[:count, 0] = ~to_device(is_multimodal, self.step_is_text.device)
        self.step_embeds[:count] = embeds
        return embeds

    def embed_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What rows have of token ids ``[n]`` alone, outside a step: text embeddings ``[n, hidden]``."""
        embeds: torch.Tensor = super().embed_input_ids(input_ids)
        return embeds

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Last hidden states ``[n, hidden]`` of a step; keeps their rows on the way."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        output = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        hidden: torch.Tensor | IntermediateTensors
        hidden, (inner, *_) = output if isinstance(output, tuple) else (output, [output])
        if isinstance(hidden, torch.Tensor):
            count = hidden.shape[0]
            rows = self.row_of(inner, self.step_embeds[:count], self.step_is_text[:count])
            self.conditioning.write_batch(rows, positions)
        return hidden
