"""The vocoder: log-mel frames to samples, whole or chunk by chunk.

The network is transformers' BigVGAN (Lee et al., "BigVGAN: A Universal Neural Vocoder with
Large-Scale Training", 2023).  It is convolutional: a sample depends on a fixed number of mel frames
around it.  Given that many frames on either side of a chunk, the chunk's samples are those of the whole.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

from shared.errors import CheckpointError

# Sizes that the reference class fixes and its configuration therefore lacks.
_OUTER_KERNEL = 7
_ACTIVATION_RATIO = 2
_ACTIVATION_KERNEL = 12


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
