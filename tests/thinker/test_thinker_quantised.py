"""A thinker of quantised weights, and one with a quantised KV cache, beside plain ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.answers import Reference, random_prompt
from tests.support.thinking import ThinkerRig, speech_of, thinker_request
from tests.thinker.conftest import MakeThinker

pytestmark = pytest.mark.long
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""In which AWQ packs eight numbers of four bits into one of 32."""
IN_ORDER = tuple(range(8))
QUANTISED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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


@pytest.fixture(scope="module", params=FORMATS)
def checkpoints(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The tiny checkpoint with a thinker of four bits, and with the weights that these stand for."""
    quantise, options = FORMATS[request.param]
    weights = load_file(tiny_checkpoint / "model.safetensors")
    packed, plain = dict(weights), dict(weights)
    for name in weights:
        if name.startswith("thinker.model.layers.") and name.endswith(
            tuple(f"{q}.weight" for q in QUANTISED)
        ):
            tensors, plain[name] = quantise(packed.pop(name))
            packed |= {name.replace("weight", kind): tensor for kind, tensor in tensors.items()}
    assert len(packed) > len(plain)
    directories = []
    for kind, tensors in (("packed", packed), ("plain", plain)):
        directory = tmp_path_factory.mktemp("quantised") / kind
        shutil.copytree(tiny_checkpoint, directory)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
        directories.append(directory)
    config = json.loads((directories[0] / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": request.param,
        "bits": 4,
        "group_size": GROUP,
        **options,
    }
    (directories[0] / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directories[0], directories[1]


def rows_of(rig: ThinkerRig, length: int) -> torch.Tensor:
    """The rows of a prompt that is answered."""
    rig.run(thinker_request("a", random_prompt(length), speech=speech_of(), max_tokens=4))
    return rig.rows("a")[:length].float()


def difference(rows: torch.Tensor, others: torch.Tensor) -> float:
    """How far rows are from others, as a share of these."""
    return float((rows - others).norm() / others.norm())


def test_four_bits_answer_as_the_weights_they_stand_for_in_transformers(
    checkpoints: tuple[Path, Path],
    tiny_checkpoint: Path,
    make_thinker: MakeThinker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With AMX vLLM would quantise what flows through, too, which has an error of its own.
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    directory, plain = checkpoints
    packed, unpacked = (rows_of(make_thinker(each, dtype="bfloat16"), 130) for each in (directory, plain))
    rows, whole = (
        Reference(each)
        .answer(random_prompt(130), thinker_max_new_tokens=4, talker_max_new_tokens=2)
        .rows[:130]
        for each in (plain, tiny_checkpoint)
    )
    # How far bfloat16 is from float32 differs with the processor, so it is measured where the test runs.
    rounding = difference(unpacked, rows)
    assert difference(packed, rows) < 2 * rounding
    # The weights before they were quantised are further off, so the test sees what was loaded.
    assert difference(whole, rows) > 5 * rounding


def test_a_quantised_cache_changes_rows_little(tiny_checkpoint: Path, make_thinker: MakeThinker) -> None:
    plain, quantised = (
        make_thinker(tiny_checkpoint, dtype="bfloat16", kv_cache_dtype=dtype) for dtype in ("auto", "fp8")
    )
    assert quantised.model.conditioning.layer.kv_cache.dtype is torch.bfloat16
    assert 0 < difference(rows_of(quantised, 130), rows_of(plain, 130)) < 0.1
