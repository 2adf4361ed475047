"""Checkpoints whose thinkers have weights of four bits, in the layouts of released ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.vllm.platform import lacks_avx512

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""In which AWQ packs eight numbers of four bits into one of 32."""
IN_ORDER = tuple(range(8))
QUANTISED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

needs_four_bits = pytest.mark.skipif(lacks_avx512(), reason="four bits need AVX-512 on a CPU")

Quantised = tuple[dict[str, torch.Tensor], torch.Tensor]


def gptq(weight: torch.Tensor) -> Quantised:
    """Quantise a weight ``[out, in]`` to four bits, as GPTQ's files have it: symmetric, zero is 8.

    Returns:
        The tensors that take its place, and what they stand for.
    """
    values = weight.float().T.unflatten(0, (-1, GROUP))
    scales = (values.abs().amax(dim=1) / 7).clamp_min(1e-6).to(torch.float16)
    numbers = (values / scales.float()[:, None] + 8).round().clamp(0, 15)
    plain = ((numbers - 8) * scales.float()[:, None]).flatten(0, 1).T
    inputs, zeros = weight.shape[1], torch.full_like(scales, 7)
    tensors = {
        "qweight": pack(numbers.flatten(0, 1).T, IN_ORDER).T,
        # One less than they are.
        "qzeros": pack(zeros, IN_ORDER),
        "scales": scales,
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }
    return tensors, plain


def awq(weight: torch.Tensor) -> Quantised:
    """Quantise a weight ``[out, in]`` to four bits, as AWQ's files have it.

    Returns:
        The tensors that take its place, and what they stand for.
    """
    values = weight.float().T.unflatten(0, (-1, GROUP))
    low, high = values.amin(dim=1), values.amax(dim=1)
    scales = ((high - low) / 15).clamp_min(1e-6).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(0, 15)
    numbers = (values / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    plain = ((numbers - zeros[:, None]) * scales.float()[:, None]).flatten(0, 1).T
    tensors = {
        "qweight": pack(numbers.flatten(0, 1), AWQ_ORDER),
        "qzeros": pack(zeros, AWQ_ORDER),
        "scales": scales,
    }
    return tensors, plain


def pack(numbers: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Pack numbers of four bits ``[n, 8 * m]`` as int32 ``[n, m]``."""
    eights = numbers.to(torch.int64).unflatten(1, (-1, 8))[:, :, list(order)]
    packed = (eights << (4 * torch.arange(8))).sum(dim=2)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


FORMATS: dict[str, tuple[Callable[[torch.Tensor], Quantised], dict[str, Any]]] = {
    "awq": (awq, {"zero_point": True, "version": "gemm", "modules_to_not_convert": ["visual"]}),
    "gptq": (
        gptq,
        {"desc_act": False, "sym": True, "dynamic": {"-:.*visual.*": {}, "-:.*audio_tower.*": {}}},
    ),
}


def quantise(
    source: Path,
    kind: str,
    packed: Path,
    plain: Path | None = None,
    dtype: str | None = None,
    parts: tuple[str, ...] = QUANTISED,
    **excluded: Any,
) -> None:
    """Write a checkpoint with a thinker of four bits, and one with the weights that these stand for.

    Args:
        source: A checkpoint of plain weights.
        kind: Of :data:`FORMATS`.
        packed: Directory to be made.
        plain: Another one, if it is wanted.
        dtype: What ``config.json`` says that the weights are to be computed in, if not what it said.
        parts: Ends of the names of layers that are quantised.
        excluded: Options of ``quantization_config`` that exclude the others.
    """
    quantised, options = FORMATS[kind]
    weights = load_file(source / "model.safetensors")
    four_bits, stood_for = dict(weights), dict(weights)
    for name in weights:
        if name.startswith("thinker.model.layers.") and name.endswith(
            tuple(f"{each}.weight" for each in parts)
        ):
            tensors, stood_for[name] = quantised(four_bits.pop(name))
            four_bits |= {name.replace("weight", part): tensor for part, tensor in tensors.items()}
    assert len(four_bits) > len(stood_for)
    for directory, tensors in ((packed, four_bits), (plain, stood_for)):
        if directory is not None:
            shutil.copytree(source, directory)
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": kind,
        "bits": 4,
        "group_size": GROUP,
        **options,
        **excluded,
    }
    if dtype is not None:
        config["dtype"] = dtype
    (packed / "config.json").write_text(json.dumps(config), encoding="utf-8")
