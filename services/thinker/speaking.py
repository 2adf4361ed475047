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
    ``prompt_lengths`` says of the requests that begin with this step, by ``id`` of their list of tokens, how
    many of these are the prompt: what follows is a reply that is computed again.
    """

    step_embeds: torch.Tensor
    step_is_text: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        model = vllm_config.model_config
        text_config, hidden_size = model.hf_text_config, model.get_hidden_size()
        self.prompt_lengths: dict[int, int] = {}
        self.conditioning = ConditioningStore(
            self.row_width(hidden_size), text_config.num_hidden_layers, vllm_config.cache_config
        )
        # Buffers: vLLM computes embeddings outside the captured part of a step, which reads them here.
        most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        for name, width in (("step_embeds", hidden_size), ("step_is_text", 1)):
            buffer = torch.zeros(most_tokens, width, dtype=model.dtype)
            self.register_buffer(name, buffer, persistent=False)

    @staticmethod
    def row_width(hidden_size: int) -> int:
        """Elements of a row."""
        return hidden_size

    @staticmethod
    def row_of(hidden: torch.Tensor, embeds: torch.Tensor, is_text: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, row_width]`` by last hidden states and the first layer's input, ``[n, hidden]`` each.

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
        """Text embeddings ``[n, hidden]`` of token ids ``[n]``, outside a step."""
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
        hidden: torch.Tensor | IntermediateTensors = super().forward(
            input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
        )
        if isinstance(hidden, torch.Tensor):
            count = hidden.shape[0]
            rows = self.row_of(hidden, self.step_embeds[:count], self.step_is_text[:count])
            self.conditioning.write_batch(rows, positions)
        return hidden
