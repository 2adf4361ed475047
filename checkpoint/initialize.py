"""Random weights whose outputs are about as large as their inputs, for every kind of layer in the model."""

import math
import zlib

import torch
from torch import nn

_BIAS = 0.05
_NORM_SPREAD = 0.1


def generator_for(seed: int, part: str) -> torch.Generator:
    """Return a generator of its own for one part, so that no part's shape changes another's weights."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{part}".encode()))


@torch.no_grad()
def fill(module: nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter of ``module`` anew; buffers stay as they are.

    Matrices keep the size of a signal (variance 1 / inputs), embeddings have unit variance, and norms and
    biases are off their neutral values, so that a server that forgets to load one gives other results.
    """
    for layer in module.modules():
        fill_layer(layer, generator)


@torch.no_grad()
def fill_layer(layer: nn.Module, generator: torch.Generator) -> None:
    """Draw the parameters of one layer alone, without those of its children."""
    for name, parameter in layer.named_parameters(recurse=False):
        parameter.normal_(generator=generator)
        if isinstance(layer, nn.Embedding):
            continue
        if name == "weight" and parameter.dim() > 1:
            parameter.div_(math.sqrt(_inputs(layer, parameter)))
        elif name == "weight":
            parameter.mul_(_NORM_SPREAD).add_(1.0)
        elif parameter.dim() == 3 and not isinstance(layer, nn.modules.conv._ConvNd):
            # The matrices of experts, side by side.
            parameter.div_(math.sqrt(parameter.shape[2]))
        else:
            parameter.mul_(_BIAS)


def _inputs(layer: nn.Module, weight: torch.Tensor) -> float:
    """Return how many inputs one output of the layer adds up."""
    if isinstance(layer, nn.ConvTranspose1d):
        return weight.shape[0] * weight.shape[2] / layer.stride[0]
    return weight.numel() / weight.shape[0]
