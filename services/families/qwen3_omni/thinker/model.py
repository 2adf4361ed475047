"""The thinker: vLLM's Qwen3-Omni thinker that also keeps the talker's input for each position."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerResizeMLP
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniAudioFeatureInputs
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerDummyInputsBuilder,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerMultiModalProcessor,
    Qwen3OmniMoeThinkerProcessingInfo,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.utils import get_mm_embedding_modalities
from vllm.sequence import IntermediateTensors

from services.families.qwen3_omni.files import PROJECTIONS, is_of_another
from services.families.qwen3_omni.thinker.media import TokenClock
from services.families.qwen_media.spans import engine_positions
from services.thinker.speaking import SpeakingModel


class SeparatingThinker(Qwen3OmniMoeThinkerForConditionalGeneration):
    """vLLM's thinker, which also gives an inner layer's hidden states.

    An item's embeddings do not depend on what else is in a step.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # The reference counts the embeddings as layer 0; behind the last one it takes the normed states.
        self.accepted_layer = int(vllm_config.model_config.hf_config.talker_config.accept_hidden_layer)
        if self.accepted_layer < self.config.text_config.num_hidden_layers:
            self.set_aux_hidden_state_layers((self.accepted_layer,))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        """Last hidden states ``[n, hidden]``, and the inner ones: without what pictures add right behind."""
        added, level = None, self.accepted_layer - 1
        if inputs_embeds is not None and 0 <= level < self.deepstack_num_level:
            added = self.deepstack_input_embeds[level][: inputs_embeds.shape[0]].clone()
        output = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        if added is None or not isinstance(output, tuple):
            return output
        hidden, (inner,) = output
        return hidden, [inner - added]

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Text embeddings ``[n, hidden]`` with those of media in their places, kind by kind.

        vLLM does so only where it sees sound and pictures alternate within the step, which a step that cuts
        a video may hide from it.
        """
        embeds: torch.Tensor = self._embed_text_input_ids(
            input_ids, self.language_model.embed_input_ids, is_multimodal=is_multimodal
        )
        if not multimodal_embeddings or is_multimodal is None:
            return embeds
        count, hidden = embeds.shape
        levels = embeds.new_zeros(count, self.deepstack_num_level, hidden)
        ids = input_ids.to(is_multimodal.device)
        kinds = get_mm_embedding_modalities(multimodal_embeddings)
        for kind in set(kinds):
            places = is_multimodal & (ids == getattr(self.config, f"{kind}_token_id"))
            own = [each for each, its in zip(multimodal_embeddings, kinds, strict=True) if its == kind]
            merged = torch.cat(own).to(embeds.dtype)
            embeds[places] = merged[:, :hidden]
            if kind != "audio":
                levels[places] = merged[:, hidden:].view(-1, self.deepstack_num_level, hidden)
        if set(kinds) != {"audio"}:
            self._set_deepstack_input_embeds(levels.transpose(0, 1))
        return embeds

    def _process_audio_input(self, audio_input: Qwen2_5OmniAudioFeatureInputs) -> tuple[torch.Tensor, ...]:
        """Embeddings ``[tokens, hidden]`` of each item.

        The encoder pads what is shorter than a convolution's chunk to the longest beside it, and hears that.
        So those that have a whole chunk are encoded together, and each of the others alone.
        """
        features, lengths = audio_input["input_features"], audio_input["audio_feature_lengths"].flatten()
        pieces = features.split(lengths.tolist(), dim=1)
        chunk = 2 * self.config.audio_config.n_window
        whole = [at for at, piece in enumerate(pieces) if piece.shape[1] >= chunk]
        found: dict[int, torch.Tensor] = {}
        for group in (whole, *([at] for at in range(len(pieces)) if at not in whole)):
            if group:
                found.update(
                    zip(group, self._encode([pieces[at] for at in group], lengths[group]), strict=True)
                )
        return tuple(found[at] for at in range(len(pieces)))

    def _encode(self, pieces: Sequence[torch.Tensor], lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        encoded: tuple[torch.Tensor, ...] = super()._process_audio_input(
            Qwen2_5OmniAudioFeatureInputs(
                type="audio_features",
                input_features=torch.cat(list(pieces), dim=1),
                audio_feature_lengths=lengths,
                feature_attention_mask=[torch.ones(piece.shape[1]) for piece in pieces],
            )
        )
        return encoded


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3OmniMoeThinkerMultiModalProcessor,
    info=Qwen3OmniMoeThinkerProcessingInfo,
    dummy_inputs=Qwen3OmniMoeThinkerDummyInputsBuilder,
)
class FrameThinker(SpeakingModel, SeparatingThinker):
    """A thinker whose states can be spoken.

    A position's row is the projection of its text embedding, or at image, audio and video tokens of the
    hidden state that enters the accepted layer: what transformers' ``generate`` hands to the talker.
    """

    hf_to_vllm_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_prefix={name: name.removeprefix("talker.") for name in PROJECTIONS}
        | Qwen3OmniMoeThinkerForConditionalGeneration.hf_to_vllm_mapper.orig_to_new_prefix
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        talker = config.talker_config
        self.speaks = config.enable_audio_output
        if not self.speaks:
            return
        self.text_projection = Qwen3OmniMoeTalkerResizeMLP(talker)
        self.hidden_projection = Qwen3OmniMoeTalkerResizeMLP(talker)

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Whether vLLM's loader may leave out a file that has nothing but such tensors."""
        return is_of_another(name)

    @staticmethod
    def row_width(vllm_config: VllmConfig) -> int:
        """As wide as the talker's hidden states, or if there is no talker as the thinker's."""
        config = vllm_config.model_config.hf_config
        part = config.talker_config if config.enable_audio_output else config.thinker_config
        width: int = part.text_config.hidden_size
        return width

    def row_of(self, hidden: torch.Tensor, embeds: torch.Tensor, is_text: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, row_width]``; both projections of all positions are little beside the model."""
        if not self.speaks:
            return hidden
        return torch.where(is_text.bool(), self.text_projection(embeds), self.hidden_projection(hidden))

    def embed_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, row_width]`` of token ids ``[n]``, outside a step."""
        rows: torch.Tensor = self.text_projection(super().embed_text(input_ids))
        return rows

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """M-RoPE position ids int64 ``[3, n]`` of a prompt, and what a token behind it adds to its index."""
        return engine_positions(input_tokens, mm_features, TokenClock.of(self.config))
