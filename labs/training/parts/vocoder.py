"""Trains the vocoder, a small BigVGAN, with multi-resolution spectral and mel losses and no discriminator."""

import functools
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniToken2WavBigVGANModel,
)

from checkpoint.config import bigvgan_config
from checkpoint.shape import SPEAKING, CheckpointShape
from labs.training.data import mel
from labs.training.data.corpus import VOICES, SpeechCorpus
from labs.training.parts.loop import Losses, Recipe, Step, Stop, Training, device

NAME = "vocoder"
RECIPE = Recipe(steps=6_000, rate=1e-3, betas=(0.8, 0.99), weight_decay=0.0, clip=10.0)
_FRAMES = 34
_BATCH = 4
_RESOLUTIONS = (2048, 1024, 512, 256, 128)
_MEL_WEIGHT = 2.0
_SEED = 0
_COMPILED_FROM = 1000


class PolyphaseActivation(Qwen2_5OmniAntiAliasedActivation1d):
    """The reference's anti-aliased activation in a form that one kernel can compute.

    A transposed convolution with one filter for all channels inserts zeros and multiplies by them.  Here the
    even and odd samples of the upsampled signal are two filters of the input, and downsampling is one of
    each, which a compiler fuses: training on a CPU is three times as fast.  Parameters and result are the
    reference class's.
    """

    compiled = False

    def __init__(self, activation: nn.Module) -> None:
        super().__init__(activation)
        up, down = 2 * self.upsample.filter.flatten(), self.downsample.filter.flatten()
        # As correlations: sample 2n is made of the inputs n-3..n+2, sample 2n+1 of n-2..n+3.
        self._up_taps = (up.flip(0)[::2].tolist(), up.flip(0)[1::2].tolist())
        self._down_taps = (down[1::2].tolist(), down[::2].tolist())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[batch, channels, time] -> the same."""
        compute = _compiled_activation() if self.compiled else _activate
        alpha, beta = torch.exp(self.act.alpha)[:, None], torch.exp(self.act.beta)[:, None]
        result: torch.Tensor = compute(
            hidden_states, alpha, beta + self.act.no_div_by_zero, self._up_taps, self._down_taps
        )
        return result


Taps = tuple[list[float], list[float]]


def _activate(
    values: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, up: Taps, down: Taps
) -> torch.Tensor:
    time = values.shape[-1]
    padded = functional.pad(values, (3, 3), mode="replicate")
    even = _snake(_correlate(padded[..., :-1], up[0], time), alpha, beta)
    odd = _snake(_correlate(padded[..., 1:], up[1], time), alpha, beta)
    # The reference pads the upsampled signal by its first sample (even) and its last (odd).
    first, last = even[..., :1].expand(-1, -1, 3), odd[..., -1:].expand(-1, -1, 3)
    even = torch.cat([first[..., 1:], even, last], -1)
    odd = torch.cat([first, odd, last[..., 1:]], -1)
    return _correlate(even, down[0], time) + _correlate(odd, down[1], time)


def _snake(values: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return values + torch.sin(values * alpha).square() / beta


def _correlate(padded: torch.Tensor, taps: list[float], time: int) -> torch.Tensor:
    total = padded[..., :time] * taps[0]
    for shift in range(1, len(taps)):
        total = total + padded[..., shift : shift + time] * taps[shift]
    return total


@functools.cache
def _compiled_activation() -> Any:
    return torch.compile(_activate, dynamic=False)


def build(shape: CheckpointShape = SPEAKING) -> Any:
    """Return a new ``Qwen2_5OmniToken2WavBigVGANModel``, the same for every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return Qwen2_5OmniToken2WavBigVGANModel._from_config(
            Qwen2_5OmniBigVGANConfig(**bigvgan_config(shape))
        )


def use_polyphase(model: nn.Module, *, compiled: bool = False) -> None:
    """Replace the model's anti-aliased activations by equal ones that train faster."""
    PolyphaseActivation.compiled = compiled
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Qwen2_5OmniAntiAliasedActivation1d):
                parent.add_module(name, PolyphaseActivation(child.act))


def waveform(model: Any, mels: torch.Tensor) -> torch.Tensor:
    """Return samples for log-mels ``[batch, 80, frames]``; the reference's forward pass, on any device."""
    hidden = model.conv_pre(model.process_mel_spectrogram(mels))
    count = model.num_residual_blocks
    for layer, upsample in enumerate(model.ups):
        hidden = upsample[0](hidden)
        hidden = sum(block(hidden) for block in model.resblocks[layer * count : (layer + 1) * count]) / count
    wave: torch.Tensor = model.conv_post(model.activation_post(hidden)).clamp(-1.0, 1.0).squeeze(1)
    return wave


def train(corpus: SpeechCorpus, directory: Path, stop: Stop, recipe: Recipe = RECIPE) -> Training:
    """Train the vocoder, resuming the state in ``directory``."""
    place = device()
    model = build()
    # Compilation takes a minute or two, which short runs do not regain.
    use_polyphase(model, compiled=recipe.steps > _COMPILED_FROM and shutil.which("c++") is not None)
    model.to(place)
    training = Training(NAME, model, recipe, directory)
    items = [item for voice in VOICES for item in corpus.of(voice) if item.codes * 2 > _FRAMES]

    def losses_of(step: Step) -> Losses:
        mels, waves = _batch(corpus, items, random.Random(step.seed))
        mels, waves = mels.to(place), waves.to(place)
        made = waveform(model, mels)
        mel_loss = (mel.log_mel(made) - mels).abs().mean()
        return {"spectrum": _spectral_loss(made, waves), "mel": _MEL_WEIGHT * mel_loss}

    training.run(losses_of, stop)
    return training


def _batch(
    corpus: SpeechCorpus, items: list[Any], generator: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    mels, waves = [], []
    for item in generator.choices(items, k=_BATCH):
        start = generator.randrange(item.codes * 2 - _FRAMES)
        mels.append(corpus.mel(item)[start : start + _FRAMES].T)
        waves.append(corpus.wave(item)[start * mel.HOP : (start + _FRAMES) * mel.HOP])
    return torch.from_numpy(np.stack(mels)), torch.from_numpy(np.stack(waves))


def _spectral_loss(made: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the mean over resolutions of log-magnitude distance and spectral convergence."""
    losses = []
    for length in _RESOLUTIONS:
        ours, theirs = _magnitude(made, length), _magnitude(true, length)
        convergence = (ours - theirs).square().sum().sqrt() / (theirs.square().sum().sqrt() + 1e-3)
        losses.append((ours.log() - theirs.log()).abs().mean() + convergence)
    return torch.stack(losses).mean()


def _magnitude(waves: torch.Tensor, length: int) -> torch.Tensor:
    spectrum = torch.stft(
        waves, length, length // 4, length, mel.hann(length, waves.device), return_complex=True
    )
    return torch.sqrt(spectrum.real.square() + spectrum.imag.square() + 1e-7)
