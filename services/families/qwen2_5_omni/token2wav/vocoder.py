"""The vocoder: log-mel frames to samples, whole or chunk by chunk.

The network is transformers' BigVGAN (Lee et al., "BigVGAN: A Universal Neural Vocoder with
Large-Scale Training", 2023).  It is convolutional: a sample depends on a fixed number of mel frames
around it.  Given that many frames on either side of a chunk, the chunk's samples are those of the whole.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniToken2WavBigVGANModel,
)

from omnirelay.errors import CheckpointError

# Sizes that the reference class fixes and its configuration therefore lacks.
_OUTER_KERNEL = 7
_ACTIVATION_RATIO = 2
_ACTIVATION_KERNEL = 12
_FLOOR_DB, _REFERENCE_DB = -115, 20
_QUIETEST = float(torch.exp(torch.tensor(_FLOOR_DB / 20.0 * math.log(10))))
_REACH = _ACTIVATION_KERNEL // (2 * _ACTIVATION_RATIO)
"""Samples of one phase, or of the input, to either side that one result needs."""


class Taps(NamedTuple):
    """Filters of an anti-aliased activation: of even and odd samples, and back."""

    even: tuple[float, ...]
    odd: tuple[float, ...]
    down: tuple[float, ...]


class Context(NamedTuple):
    """Positions before and after something on which its samples depend."""

    left: int
    right: int


def samples_per_frame(config: Qwen2_5OmniBigVGANConfig) -> int:
    """Samples that one mel frame lasts; raises CheckpointError if they are no whole number."""
    for rate, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
        if kernel < rate or (kernel - rate) % 2:
            raise CheckpointError(
                f"bigvgan_config: upsample_kernel_sizes has {kernel} where upsample_rates has {rate}; "
                "their difference must be even and not negative"
            )
    return math.prod(config.upsample_rates)


def contexts(config: Qwen2_5OmniBigVGANConfig) -> list[Context]:
    """Compute how much beside some mel frames their samples depend on, exactly, from the kernel sizes.

    Follows the interval on which the samples of frame 0 depend backwards through the layers of
    ``Qwen2_5OmniToken2WavBigVGANModel``, for the mel frames and the input of each upsampling layer.
    """
    span = samples_per_frame(config)
    margin = _OUTER_KERNEL // 2 + _activation_reach()
    low, high = -margin, span - 1 + margin
    blocks = max(
        sum(2 * _activation_reach() + (kernel - 1) // 2 * (dilation + 1) for dilation in dilations)
        for kernel, dilations in zip(
            config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
        )
    )
    found: list[Context] = []
    layers = list(zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True))
    for rate, kernel in reversed(layers):
        padding = (kernel - rate) // 2
        low = -((kernel - 1 - padding - (low - blocks)) // rate)
        high = (high + blocks + padding) // rate
        span //= rate
        found.insert(0, Context(left=-low, right=high - (span - 1)))
    outer = _OUTER_KERNEL // 2
    return [Context(found[0].left + outer, found[0].right + outer), *found]


def _activation_reach() -> int:
    """Positions to either side on which one output of an anti-aliased activation depends.

    Output n reads the upsampled positions 2n-5..2n+6, and upsampled position m reads the inputs
    ceil((m-6)/2)..floor((m+5)/2) (reference: ``Qwen2_5OmniDownSample1d``, ``Qwen2_5OmniUpSample1d``).
    """
    down_left = _ACTIVATION_KERNEL // 2 - 1
    up_left = _ACTIVATION_KERNEL // 2
    return (down_left + up_left) // _ACTIVATION_RATIO


def activation(hidden: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, taps: Taps) -> torch.Tensor:
    """Snake between upsampling and downsampling by two, [pieces, channels, time].

    ``alpha`` and ``beta`` [channels, 1] are factors of ``x + sin(alpha x)^2 / beta``; what
    :class:`AntiAliasedActivation` says of filters holds here.
    """
    shifted = _shifted(functional.pad(hidden, (_REACH, _REACH), mode="replicate"))
    even, odd = _weighted(shifted[:-1], taps.even), _weighted(shifted[1:], taps.odd)
    for phase in (even, odd):
        phase.addcdiv_((phase * alpha).sin_().square_(), beta)
    # The upsampled signal is padded with its first sample, an even one, and its last, an odd one.
    first, last = even[..., :1].expand(-1, -1, _REACH), odd[..., -1:].expand(-1, -1, _REACH)
    evens, odds = (_shifted(torch.cat([first, phase, last], dim=-1)) for phase in (even, odd))
    return _weighted([*evens[1:], *odds[:-1]], taps.down)


def _shifted(padded: torch.Tensor) -> list[torch.Tensor]:
    """A signal without its padding, shifted by each number of positions; for any length at once."""
    time = padded.shape[-1] - 2 * _REACH
    return [padded[..., first : first + time] for first in range(2 * _REACH + 1)]


def _weighted(values: Sequence[torch.Tensor], taps: Sequence[float]) -> torch.Tensor:
    """Sum shifted copies of a signal, each times its tap."""
    total = values[0] * taps[0]
    for value, tap in zip(values[1:], taps[1:], strict=True):
        total.add_(value, alpha=tap)
    return total


compiled_activation = torch.compile(activation, dynamic=True)
"""Of all layers; compiled at the first call."""


class AntiAliasedActivation(Qwen2_5OmniAntiAliasedActivation1d):
    """Snake between upsampling and downsampling by two, on a CPU as sums of shifted copies.

    On a GPU it is compiled where ``fused`` is set, and else the reference class's.

    A transposed convolution with one filter for all channels inserts zeros and multiplies by them, and
    a library for convolutions is at its worst with single channels.  Even and odd samples of the
    upsampled signal are two short filters of the input instead, and downsampling is one of each.  The
    parameters and the result are the reference class's.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__(activation)
        up = (2 * self.upsample.filter).flatten().tolist()
        down = self.downsample.filter.flatten().tolist()
        # Sample 2n is made of the inputs n-3..n+2, sample 2n+1 of n-2..n+3.
        # And sample n of the result of the even ones n-2..n+3 and the odd ones n-3..n+2.
        self.taps: Final = Taps(tuple(up[::-2]), tuple(up[-2::-2]), (*down[1::2], *down[::2]))
        self.fused = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[pieces, channels, time] -> the same."""
        if hidden_states.is_cpu or self.fused:
            compute = activation if hidden_states.is_cpu else compiled_activation
            return compute(hidden_states, *self._factors(), self.taps)
        output: torch.Tensor = super().forward(hidden_states)
        return output

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Alpha and beta, [channels, 1]."""
        beta = torch.exp(self.act.beta)[:, None] + self.act.no_div_by_zero
        return torch.exp(self.act.alpha)[:, None], beta


class Vocoder(nn.Module):
    """BigVGAN on a part of a spectrogram, each layer on what the part needs of it.

    With ``fused`` activations are compiled on a GPU.
    """

    def __init__(self, config: Qwen2_5OmniBigVGANConfig, fused: bool = False) -> None:
        super().__init__()
        self.context, *self._layer_contexts = contexts(config)
        self.hop = samples_per_frame(config)
        self.bigvgan = Qwen2_5OmniToken2WavBigVGANModel(config)
        for parent in list(self.bigvgan.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Qwen2_5OmniAntiAliasedActivation1d):
                    made = AntiAliasedActivation(child.act)
                    made.fused = fused
                    parent.add_module(name, made)

    def forward(self, left: torch.Tensor, target: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Make float32 [..., target frames, mel_dim] audio, float32 [..., target frames * hop], in [-1, 1].

        The network pads with silence where the frames end; so ``left`` must reach the stream's start or
        be ``context.left`` frames long for the samples to be those of the whole, and ``right`` likewise.
        What is more than that is cut off, as in later layers, which need less.
        """
        bigvgan = self.bigvgan
        whole = torch.cat([left, target, right], dim=-2)
        mel = whole.view(-1, *whole.shape[-2:]).transpose(1, 2)
        before, after = left.shape[-2], right.shape[-2]
        mel, before, after = _crop(mel, before, after, self.context)
        hidden_states = bigvgan.conv_pre(_normalized(mel))
        count = bigvgan.num_residual_blocks
        for layer, needed in enumerate(self._layer_contexts):
            hidden_states, before, after = _crop(hidden_states, before, after, needed)
            hidden_states = bigvgan.ups[layer][0](hidden_states)
            rate = bigvgan.config.upsample_rates[layer]
            before, after = before * rate, after * rate
            blocks = bigvgan.resblocks[layer * count : (layer + 1) * count]
            hidden_states = sum(block(hidden_states) for block in blocks) / count
        waveform = bigvgan.conv_post(bigvgan.activation_post(hidden_states)).clamp(-1.0, 1.0)
        waveform = waveform.view(*whole.shape[:-2], -1)
        return waveform[..., before : waveform.shape[-1] - after]


def _normalized(mel: torch.Tensor) -> torch.Tensor:
    """Log-mel to decibels in [-1, 1], as the reference does.

    It makes tensors of numbers for it, each a copy from the host.
    """
    decibels = 20 * torch.log10(torch.exp(mel).clamp(min=_QUIETEST)) - _REFERENCE_DB
    return (2 * ((decibels - _FLOOR_DB) / -_FLOOR_DB) - 1).clamp(-1, 1)


def _crop(values: torch.Tensor, before: int, after: int, needed: Context) -> tuple[torch.Tensor, int, int]:
    """Cut off, [..., time], what is not needed beside the target; gives what there is beside it then."""
    left, right = min(before, needed.left), min(after, needed.right)
    return values[..., before - left : values.shape[-1] - (after - right)], left, right
