"""The diffusion transformer of token2wav, batched over requests at different times.

Reference: ``Qwen2_5OmniToken2WavDiTModel`` of transformers; the model is F5-TTS's DiT (Chen et al.,
2024) with block-wise attention.  Parameter names are the checkpoint's.  What differs is the shape of
the work: blocks of many sequences in one batch (see ``blocks``), each request at its own time, the two
branches of guidance as rows of the same batch, and everything constant over the solver's steps computed
once (see ``conditioning``).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    DiTCodecEmbedding,
    DiTTimestepEmbedding,
    ECAPA_TimeDelayNet,
    Qwen2_5OmniDiTRotaryEmbedding,
)

from services.families.qwen2_5_omni.token2wav.blocks import BlockLayout
from services.families.qwen2_5_omni.token2wav.ode import EVALUATIONS_PER_STEP, advance

Projection: TypeAlias = Callable[[int, int], nn.Module]
"""Makes a linear layer of so many inputs and outputs; PyTorch's own is one."""
_NORM_EPSILON = 1e-6
_GELU_CUBIC = 0.044715
_LAYER_VECTORS = 6
"""Shift, scale and gate of a layer's attention, and those of its feed-forward part."""
_OUTPUT_VECTORS = 2
"""Scale and shift before the output."""


class HalfLinear(nn.Linear):
    """A linear layer in bfloat16, from float32 and to it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, dtype=torch.bfloat16)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs], float32."""
        return super().forward(values.to(torch.bfloat16)).float()


class DiTBatch(NamedTuple):
    """What a batch of sequences keeps over all evaluations of the network."""

    layout: BlockLayout
    constant: torch.Tensor  # Of the projected input, float32 [rows, block_size, hidden]
    rotation: torch.Tensor  # Rotary table, cosines and sines, float32 [rows, block_size, head_dim / 2, 2]
    modulation: torch.Tensor  # Of all layers at each evaluation, float32 [evaluations, values]
    length: torch.Tensor  # Of the solver's step that an evaluation belongs to, float32 [evaluations]


class InputEmbedding(nn.Module):
    """Projection of the noisy mel and its conditions into the transformer.

    The reference concatenates mel, voice (ECAPA-TDNN), codec embedding and speaker embedding; a
    projection of a concatenation is a sum of projections, of which only the mel's changes with time.
    """

    def __init__(self, config: Qwen2_5OmniDiTConfig) -> None:
        super().__init__()
        self._widths = [config.mel_dim, config.enc_dim, config.emb_dim, config.enc_emb_dim]
        self.proj = nn.Linear(sum(self._widths), config.hidden_size)
        self.spk_encoder = ECAPA_TimeDelayNet(config)

    def project_mel(self, mel: torch.Tensor) -> torch.Tensor:
        """Project mel frames, [..., mel_dim] -> [..., hidden], without the bias."""
        return functional.linear(mel, self._columns()[0])

    def project_voice(self, ref_mel: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        """Project a voice, [1, frames, mel_dim] and [1, enc_emb_dim], with the bias; float32 [hidden]."""
        _, voice, _, speaker = self._columns()
        encoded = functional.linear(self.spk_encoder(ref_mel), voice)
        return (encoded + functional.linear(cond, speaker)).squeeze(0) + self.proj.bias

    def project_codes(self, embedded: torch.Tensor) -> torch.Tensor:
        """Project embedded codec ids, [..., emb_dim] -> [..., hidden], without the bias."""
        return functional.linear(embedded, self._columns()[2])

    def _columns(self) -> tuple[torch.Tensor, ...]:
        return torch.split(self.proj.weight, self._widths, dim=1)


class BlockAttention(nn.Module):
    """Attention of each block to itself and, where the layer reaches that far, its neighbours."""

    def __init__(self, config: Qwen2_5OmniDiTConfig, ahead: bool, projection: Projection) -> None:
        super().__init__()
        self._heads = config.num_attention_heads
        self._ahead = ahead
        inner = config.head_dim * config.num_attention_heads
        self.to_q = projection(config.hidden_size, inner)
        self.to_k = projection(config.hidden_size, inner)
        self.to_v = projection(config.hidden_size, inner)
        self.to_out = nn.ModuleList([projection(inner, config.hidden_size)])

    def forward(
        self, states: torch.Tensor, batch: DiTBatch, past: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[rows, block_size, hidden] -> the same, and what it leaves; see :meth:`DiTLayer.forward`."""
        query = _rotate_first_head(self._split(self.to_q(states)), batch)
        key = _rotate_first_head(self._split(self.to_k(states)), batch)
        value = self._split(self.to_v(states))
        layout, left = batch.layout, None
        if past is not None:
            left = torch.stack([key[layout.leaving], value[layout.leaving]])
        past_key, past_value = (None, None) if past is None else past.unbind()
        attended = functional.scaled_dot_product_attention(
            query,
            layout.with_neighbours(key, past_key, self._ahead),
            layout.with_neighbours(value, past_value, self._ahead),
            attn_mask=layout.key_mask(past is not None, self._ahead),
        )
        return self.to_out[0](attended.transpose(1, 2).flatten(2)), left

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        rows, frames, _ = states.shape
        return states.view(rows, frames, self._heads, -1).transpose(1, 2)


def _rotate_first_head(states: torch.Tensor, batch: DiTBatch) -> torch.Tensor:
    """Rotate the first head of [rows, heads, block_size, head_dim], as the checkpoint was trained; in place.

    The members of a pair stand side by side in the checkpoint: a pair is a complex number.
    """
    pairs = states[:, 0].unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        # PyTorch's compiler makes no kernels for complex numbers.
        (real, imaginary), (cos, sin) = pairs.unbind(-1), batch.rotation.unbind(-1)
        rotated = [real * cos - imaginary * sin, real * sin + imaginary * cos]
        return torch.cat([torch.stack(rotated, -1).flatten(-2).unsqueeze(1), states[:, 1:]], dim=1)
    torch.view_as_complex(pairs).mul_(torch.view_as_complex(batch.rotation))
    return states


class FeedForward(nn.Module):
    """The feed-forward part of a layer (reference: ``DiTMLP``)."""

    def __init__(self, config: Qwen2_5OmniDiTConfig, projection: Projection) -> None:
        super().__init__()
        inner = config.hidden_size * config.ff_mult
        # The checkpoint counts the activation and the dropout between the two.
        self.ff = nn.ModuleDict(
            {"0": projection(config.hidden_size, inner), "3": projection(inner, config.hidden_size)}
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> the same."""
        output: torch.Tensor = self.ff["3"](_gelu_(self.ff["0"](states)))
        return output


def _gelu_(values: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh formula, in place where that pays.

    PyTorch's kernel for CPUs takes as long as the matrix product before it, its sigmoid a fifth of
    that; and (1 + tanh(u)) / 2 is sigmoid(2u).
    """
    if not values.is_cpu:
        return functional.gelu(values, approximate="tanh")
    linear = 2 * math.sqrt(2 / math.pi)
    gate = (values * values).mul_(linear * _GELU_CUBIC).add_(linear).mul_(values).sigmoid_()
    return values.mul_(gate)


class Modulation(nn.Module):
    """Time-dependent shifts, scales and gates of a layer (adaLN-Zero of Peebles & Xie, "DiT", 2023).

    ``scales`` says which of its ``count`` vectors are scales: deviations from one in the checkpoint.
    """

    def __init__(self, hidden_size: int, count: int, scales: Sequence[int]) -> None:
        super().__init__()
        self._shape = (count, hidden_size)
        self._scales = list(scales)
        self.linear = nn.Linear(hidden_size, hidden_size * count)

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        """Turn activated time embeddings, [times, hidden], into vectors, [times, count * hidden]."""
        values = self.linear(time).unflatten(-1, self._shape)
        values[:, self._scales] += 1
        return values.flatten(1)


def _modulate(states: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift, functional.layer_norm(states, states.shape[-1:], eps=_NORM_EPSILON), scale)


def layers_looking_back(config: Qwen2_5OmniDiTConfig) -> list[int]:
    """The layers whose blocks attend to the block before them, in their order."""
    return [index for index in range(config.num_hidden_layers) if index in config.look_backward_layers]


class DiTLayer(nn.Module):
    """Attention and feed-forward, both modulated by time."""

    def __init__(self, config: Qwen2_5OmniDiTConfig, index: int, projection: Projection) -> None:
        super().__init__()
        self.looks_back = index in config.look_backward_layers
        self.attn_norm = Modulation(config.hidden_size, count=_LAYER_VECTORS, scales=(1, 4))
        self.attn = BlockAttention(config, index in config.look_ahead_layers, projection)
        self.ff = FeedForward(config, projection)

    def forward(
        self, states: torch.Tensor, modulation: torch.Tensor, batch: DiTBatch, past: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute [rows, block_size, hidden] -> the same.

        Args:
            states: of the layer before.
            modulation: the layer's, float32 [rows or 1, 1, 6 * hidden].
            batch: of these requests.
            past: keys and values that the chunks take over, float32
                [2, continued rows, heads, block_size, head_dim]; None if the layer does not look back.

        Returns the states, and the keys and values of rows that are left to later chunks, or None likewise.
        """
        parts = modulation.chunk(_LAYER_VECTORS, dim=-1)
        attn_shift, attn_scale, attn_gate, ff_shift, ff_scale, ff_gate = parts
        attended, left = self.attn(_modulate(states, attn_scale, attn_shift), batch, past)
        states = torch.addcmul(states, attn_gate, attended)
        return torch.addcmul(states, ff_gate, self.ff(_modulate(states, ff_scale, ff_shift))), left


compiled_layer: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = torch.compile(DiTLayer.forward)
"""Layers of one kind, of those that look back, ahead or neither, are compiled together at the first call."""


def _compute_compiled(
    layer: nn.Module,
    states: torch.Tensor,
    modulation: torch.Tensor,
    batch: DiTBatch,
    past: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :meth:`DiTLayer.forward`; once compiled, for batches of all sizes, none of which is 0 or 1."""
    layout = batch.layout
    sized = (states, modulation, batch.rotation, layout.mask, layout.own_mask, layout.previous)
    for each in (*sized, layout.following, layout.continued, layout.leaving):
        torch._dynamo.maybe_mark_dynamic(each, 0)
    if past is not None:
        torch._dynamo.maybe_mark_dynamic(past, 1)
    return compiled_layer(layer, states, modulation, batch, past)


class DiffusionTransformer(nn.Module):
    """Velocity of a batch of noisy mel spectrograms; ``projection`` makes the linear layers."""

    def __init__(
        self, config: Qwen2_5OmniDiTConfig, guidance_scale: float, projection: Projection = nn.Linear
    ) -> None:
        super().__init__()
        self.config = config
        self.guidance_scale = guidance_scale
        self.time_embed = DiTTimestepEmbedding(config.hidden_size)
        self.text_embed = DiTCodecEmbedding(config.num_embeds, config.emb_dim, config.repeats)
        self.input_embed = InputEmbedding(config)
        self.rotary_embed = Qwen2_5OmniDiTRotaryEmbedding(config)
        self.transformer_blocks = nn.ModuleList(
            DiTLayer(config, index, projection) for index in range(config.num_hidden_layers)
        )
        self.norm_out = Modulation(config.hidden_size, count=_OUTPUT_VECTORS, scales=(0,))
        self.proj_out = projection(config.hidden_size, config.mel_dim)

    def modulation(self, times: torch.Tensor) -> torch.Tensor:
        """Shifts, scales and gates by float32 [times]: float32 [times, (6 * layers + 2) * hidden]."""
        time = functional.silu(self.time_embed(times))
        # In the order of the layers; the output's comes last.
        return torch.cat([each(time) for each in self.modules() if isinstance(each, Modulation)], dim=-1)

    def step(
        self,
        mel: torch.Tensor,
        evaluations: torch.Tensor,
        past: torch.Tensor,
        batch: DiTBatch,
        compiled: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step of the solver: a function of tensors, in which nothing depends on what they hold.

        Args:
            mel: noisy mel frames, float32 [source rows, block_size, mel_dim].
            evaluations: the step's first one of each row, or of all, int64 [rows or 1].
            past: what the chunks take over (:meth:`Carry.take`).
            batch: of these requests.
            compiled: whether PyTorch's compiler makes the layers' kernels; of a batch that was filled.

        Returns the mel frames after it, and what the chunks leave (:meth:`Carry.leave`).
        """
        left: list[torch.Tensor] = []

        def velocity(value: torch.Tensor, number: int) -> torch.Tensor:
            modulation = batch.modulation[evaluations + number].unsqueeze(1)
            output: torch.Tensor = self(value, modulation, past[number], batch, left, compiled)
            return output

        length = batch.length[evaluations[: mel.shape[0]]].view(-1, 1, 1)
        advanced = advance(velocity, mel, length)
        if not left:
            return advanced, past
        return advanced, torch.stack(left).unflatten(0, (EVALUATIONS_PER_STEP, -1))

    def forward(
        self,
        mel: torch.Tensor,
        modulation: torch.Tensor,
        past: torch.Tensor,
        batch: DiTBatch,
        left: list[torch.Tensor],
        compiled: bool = False,
    ) -> torch.Tensor:
        """The velocity with guidance, shaped as ``mel``; what stands in padded frames has no meaning.

        Args:
            mel: noisy mel frames, float32 [source rows, block_size, mel_dim].
            modulation: at this evaluation, float32 [rows or 1, 1, values].
            past: what the chunks take over at this evaluation.
            batch: of these requests.
            left: gets what they leave, of each layer that looks back.
            compiled: see :meth:`step`.
        """
        layout = batch.layout
        widths = [_LAYER_VECTORS * self.config.hidden_size] * len(self.transformer_blocks)
        modulations = modulation.split([*widths, _OUTPUT_VECTORS * self.config.hidden_size], dim=-1)
        states = self.input_embed.project_mel(mel)[layout.source] + batch.constant
        compute: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
        compute = _compute_compiled if compiled else nn.Module.__call__
        pasts = iter(past.unbind())
        for layer, values in zip(self.transformer_blocks, modulations[:-1], strict=True):
            states, leaves = compute(layer, states, values, batch, next(pasts) if layer.looks_back else None)
            left += [] if leaves is None else [leaves]
        scale, shift = modulations[-1].chunk(_OUTPUT_VECTORS, dim=-1)
        output: torch.Tensor = self.proj_out(_modulate(states, scale, shift))
        conditioned, unconditioned = output[: mel.shape[0]], output[mel.shape[0] :]
        if unconditioned.shape[0] == 0:
            return conditioned
        return conditioned + (conditioned - unconditioned) * self.guidance_scale
