"""The vocoder: log-mel frames to samples, whole or chunk by chunk.

The network is transformers' BigVGAN (Lee et al., "BigVGAN: A Universal Neural Vocoder with
Large-Scale Training", 2023).  It is convolutional: a sample depends on a fixed number of mel frames
around it.  Given that many frames on either side of a chunk, the chunk's samples are those of the whole.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniToken2WavBigVGANModel,
)

from shared.errors import CheckpointError

# Sizes that the reference class fixes and its configuration therefore lacks.
_OUTER_KERNEL = 7
_ACTIVATION_RATIO = 2
_ACTIVATION_KERNEL = 12
_REACH = _ACTIVATION_KERNEL // (2 * _ACTIVATION_RATIO)
"""Samples of one phase, or of the input, to either side that one result needs."""


class MelContext(NamedTuple):
    """Mel frames before and after a frame on which its samples depend."""

    left: int
    right: int


def samples_per_frame(config: Qwen2_5OmniBigVGANConfig) -> int:
    """Samples that one mel frame lasts.

    Raises:
        CheckpointError: the kernels would make the waveform a fraction of a frame longer.
    """
    for rate, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
        if kernel < rate or (kernel - rate) % 2:
            raise CheckpointError(
                f"bigvgan_config: upsample_kernel_sizes has {kernel} where upsample_rates has {rate}; "
                "their difference must be even and not negative"
            )
    return math.prod(config.upsample_rates)


def mel_context(config: Qwen2_5OmniBigVGANConfig) -> MelContext:
    """Compute the receptive field of one mel frame's samples exactly, from the kernel sizes.

    Follows the interval of positions on which the samples of frame 0 depend backwards through the
    layers of ``Qwen2_5OmniToken2WavBigVGANModel``.
    """
    low, high = 0, samples_per_frame(config) - 1
    margin = _OUTER_KERNEL // 2 + _activation_reach()
    low, high = low - margin, high + margin
    blocks = max(
        sum(2 * _activation_reach() + (kernel - 1) // 2 * (dilation + 1) for dilation in dilations)
        for kernel, dilations in zip(
            config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
        )
    )
    layers = list(zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True))
    for rate, kernel in reversed(layers):
        padding = (kernel - rate) // 2
        low = -((kernel - 1 - padding - (low - blocks)) // rate)
        high = (high + blocks + padding) // rate
    return MelContext(left=_OUTER_KERNEL // 2 - low, right=high + _OUTER_KERNEL // 2)


def _activation_reach() -> int:
    """Positions to either side on which one output of an anti-aliased activation depends.

    Output n reads the upsampled positions 2n-5..2n+6, and upsampled position m reads the inputs
    ceil((m-6)/2)..floor((m+5)/2) (reference: ``Qwen2_5OmniDownSample1d``, ``Qwen2_5OmniUpSample1d``).
    """
    down_left = _ACTIVATION_KERNEL // 2 - 1
    up_left = _ACTIVATION_KERNEL // 2
    return (down_left + up_left) // _ACTIVATION_RATIO


class AntiAliasedActivation(Qwen2_5OmniAntiAliasedActivation1d):
    """Snake between upsampling and downsampling by two, on a CPU as sums of shifted copies.

    A transposed convolution with one filter for all channels inserts zeros and multiplies by them, and
    a library for convolutions is at its worst with single channels.  Even and odd samples of the
    upsampled signal are two short filters of the input instead, and downsampling is one of each.  The
    parameters and the result are the reference class's.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[1, channels, time] -> the same."""
        if not hidden_states.is_cpu:
            output: torch.Tensor = super().forward(hidden_states)
            return output
        up = (2 * self.upsample.filter).flatten().tolist()
        down = self.downsample.filter.flatten().tolist()
        padded = functional.pad(hidden_states, (_REACH, _REACH), mode="replicate")[0]
        # Sample 2n is made of the inputs n-3..n+2, sample 2n+1 of n-2..n+3.
        even = self._snake(_filter(padded[:, :-1], up[::-2]))
        odd = self._snake(_filter(padded[:, 1:], up[-2::-2]))
        first, last = even[:, :1].clone(), odd[:, -1:].clone()
        even, odd = _extend(even, first, last), _extend(odd, first, last)
        # And sample n of the result of the even ones n-2..n+3 and the odd ones n-3..n+2.
        return _filter(even[:, 1:], down[1::2]).add_(_filter(odd[:, :-1], down[::2])).unsqueeze(0)

    def _snake(self, values: torch.Tensor) -> torch.Tensor:
        """Apply ``x + sin(alpha x)^2 / beta``, in place."""
        alpha = torch.exp(self.act.alpha)[:, None]
        beta = torch.exp(self.act.beta)[:, None] + self.act.no_div_by_zero
        wave = (values * alpha).sin_().square_()
        return values.addcmul_(wave, 1 / beta)


def _filter(values: torch.Tensor, taps: Sequence[float]) -> torch.Tensor:
    """Correlate each row with the taps, [rows, time + taps - 1] -> [rows, time]."""
    length = values.shape[1] - len(taps) + 1
    total = values[:, :length] * taps[0]
    for shift, tap in enumerate(taps[1:], start=1):
        total.add_(values[:, shift : shift + length], alpha=tap)
    return total


def _extend(values: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    rows = values.shape[0]
    return torch.cat([first.expand(rows, _REACH), values, last.expand(rows, _REACH)], dim=1)


class Vocoder(nn.Module):
    """BigVGAN with the crop that makes its chunks join.

    Attributes:
        context: mel frames wanted on either side of a chunk.
        hop: samples per mel frame.
    """

    def __init__(self, config: Qwen2_5OmniBigVGANConfig) -> None:
        super().__init__()
        self.context = mel_context(config)
        self.hop = samples_per_frame(config)
        self.bigvgan = Qwen2_5OmniToken2WavBigVGANModel(config)
        for parent in list(self.bigvgan.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Qwen2_5OmniAntiAliasedActivation1d):
                    parent.add_module(name, AntiAliasedActivation(child.act))

    def forward(self, left: torch.Tensor, target: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Make the target's frames audio.

        The network pads with silence where the frames end; so ``left`` must reach the stream's start or
        be ``context.left`` frames long for the samples to be those of the whole, and ``right`` likewise.

        Args:
            left: frames before the target, float32 [frames, mel_dim]; more than needed is cut off.
            target: float32 [frames, mel_dim], at least one frame.
            right: frames after it, float32 [frames, mel_dim]; more than needed is cut off.

        Returns:
            float32 [target frames * hop], in [-1, 1], on the CPU (the reference class puts it there).
        """
        left = left[max(0, left.shape[0] - self.context.left) :]
        right = right[: self.context.right]
        mel = torch.cat([left, target, right]).transpose(0, 1).unsqueeze(0)
        waveform: torch.Tensor = self.bigvgan(mel).reshape(-1)
        begin = left.shape[0] * self.hop
        return waveform[begin : begin + target.shape[0] * self.hop]
