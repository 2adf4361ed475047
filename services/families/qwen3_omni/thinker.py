"""Qwen3-Omni's thinker: vLLM's, which also keeps the talker's inputs; its track for the talker.

Reference of the track: ``Qwen3OmniMoeForConditionalGeneration.generate``, ``_get_talker_assistant_parts``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

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

from omnirelay.errors import CheckpointError, InvalidRequestError
from services.families.qwen3_omni import PROJECTIONS, is_of_another
from services.families.qwen3_omni.media import ChunkExtractor, TokenClock
from services.families.qwen_media.spans import engine_positions
from services.thinker.family import Embed, ThinkerFamily
from services.thinker.speaking import SpeakingModel
from services.thinker.track import TrackWriter
from shared.messages import ConditioningRows


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


HEADER: Final = 3
"""Tokens that begin a turn: the mark, the role, the end of the line."""
PADS: Final = 4
"""Rows of the pad token behind the header of the reply; the voice and its marks stand there."""


@dataclass(frozen=True)
class Roles:
    """Ids by which the turns of a prompt are told apart."""

    begin: int
    user: int
    assistant: int

    @classmethod
    def of(cls, config: Any) -> Self:
        """Those of a checkpoint's configuration."""
        return cls(config.im_start_token_id, config.user_token_id, config.assistant_token_id)

    def reply_start(self, prompt: Sequence[int]) -> int:
        """Where the last turn begins; raises InvalidRequestError if it is not the assistant's."""
        found = next((at for at in range(len(prompt) - 2, -1, -1) if prompt[at] == self.begin), None)
        if found is None or prompt[found + 1] != self.assistant:
            raise InvalidRequestError(
                "the prompt's last turn is not the assistant's, so no reply can be spoken: send messages"
            )
        return found

    def spoken_to(self, prompt: Sequence[int]) -> list[int]:
        """The positions of the users' turns, which the talker sees."""
        found, role = [], prompt[min(1, len(prompt) - 1)]
        for at, token in enumerate(prompt):
            if token == self.begin:
                role = prompt[min(at + 1, len(prompt) - 1)]
            if role == self.user:
                found.append(at)
        return found


class ReplyTrackWriter(TrackWriter):
    """One request's conditioning track.

    The talker's positions are: the users' turns; the header of the reply, pads, the begin of its text and
    its first token; then the further tokens of the reply (all but the last, which is never computed), the
    end of the text and a pad; the last row repeats for as long as the talker talks.

    Position ids of the users' turns are as if there were no others between them; then they run on.  Behind
    the first token of the reply they count from the largest so far, which may be that of a picture.

    ``opening`` is ``[PADS + 1, width]``, ``closing`` ``[2, width]``.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        roles: Roles,
        opening: torch.Tensor,
        closing: torch.Tensor,
    ) -> None:
        spoken_to = roles.spoken_to(prompt)
        first_reply_row = len(spoken_to) + HEADER + PADS + 1
        super().__init__(request_id, len(spoken_to), first_reply_row, opening, closing)
        self._reply_start = roles.reply_start(prompt)
        if not spoken_to:
            raise InvalidRequestError("the prompt has no turn of a user, so no reply can be spoken")
        self._spoken_to = torch.zeros(len(prompt), dtype=torch.bool)
        self._spoken_to[spoken_to] = True
        self._segment: tuple[int, int] | None = None

    def rows(self, start: int, rows: torch.Tensor, positions: torch.Tensor) -> ConditioningRows:
        """See :meth:`TrackWriter.rows`."""
        stop = start + rows.shape[0]
        users = range(start, min(stop, self._reply_start))
        wanted = [at for at in users if self._spoken_to[at]]
        index = torch.tensor([at - start for at in wanted], dtype=torch.int64)
        opened = self._reply_start + HEADER
        parts = [rows[index], rows[max(self._reply_start - start, 0) : max(opened - start, 0)]]
        if start < opened <= stop:
            parts.append(self._opening)
        parts.append(rows[max(opened - start, 0) :])
        return self._message(parts, self._as_if_alone(wanted, positions[:, index]))

    def _as_if_alone(self, wanted: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        """Position ids ``[3, m]`` of the users' turns, each moved to the end of the one before."""
        moved = positions.clone()
        for column, at in enumerate(wanted):
            if self._segment is None or self._segment[0] != at - 1:
                # A turn begins with text, whose three ids are equal.
                shift = self._next_position - int(positions[0, column])
            else:
                shift = self._segment[1]
            moved[:, column] += shift
            self._segment = at, shift
            self._next_position = int(moved[:, column].max()) + 1
            self._largest_position = max(self._largest_position, self._next_position - 1)
        return moved


class ReplySpeech:
    """See :class:`services.thinker.family.SpeechWriter`; raises CheckpointError at unknown tokens."""

    further_rows = PADS + 1

    def __init__(self, hf_config: Any, _: Path, embed: Embed) -> None:
        self.voices = list(hf_config.talker_config.speaker_id or ()) if hf_config.enable_audio_output else []
        if not self.voices:
            return
        self._roles = Roles.of(hf_config)
        pad, begin, end = (getattr(hf_config, f"tts_{name}_token_id") for name in ("pad", "bos", "eos"))
        vocabulary = hf_config.thinker_config.text_config.vocab_size
        if outside := [token for token in (pad, begin, end) if not 0 <= token < vocabulary]:
            raise CheckpointError(
                f"config.json: speech tokens {outside} lie outside the vocabulary of {vocabulary}"
            )
        rows = embed([*[pad] * PADS, begin, end, pad])
        self._opening, self._closing = rows[: PADS + 1], rows[PADS + 1 :]

    def track(self, request_id: str, prompt: Sequence[int], voice: str) -> ReplyTrackWriter:
        """Begin a request's track; the talker is told its voice by the start."""
        del voice
        return ReplyTrackWriter(request_id, prompt, self._roles, self._opening, self._closing)


def end_token_ids(hf_config: Any) -> list[int]:
    """The end of a turn, as the reference's ``generate`` has it."""
    return [hf_config.im_end_token_id]


THINKER: Final = ThinkerFamily(
    model=FrameThinker,
    end_tokens=end_token_ids,
    speech=ReplySpeech,
    rows_per_s=12.5,
    media=lambda engine, media: ChunkExtractor(engine, media.audio_clamp),
)
