"""Checkpoints of released sizes, written layer by layer; here with the sizes of the tiny one."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from checkpoint import RELEASED_3B, TINY, write_large
from checkpoint.config import model_config

SHARD_BYTES = 4_000_000
SHAPE = dataclasses.replace(TINY, talker_mrope=(8, 8, 0))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large") / "model"
    write_large(directory, SHAPE, seed=3, shard_bytes=SHARD_BYTES)
    return directory


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def test_it_has_the_tensors_of_the_other_writer(large: Path, tiny_checkpoint: Path):
    ours, theirs = weights(large), weights(tiny_checkpoint)
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }
    for name, tensor in ours.items():
        assert tensor.dtype == (torch.float32 if name.startswith("token2wav.") else torch.bfloat16), name
        assert tensor.isfinite().all(), name


def test_its_files_are_numbered_and_indexed(large: Path):
    index = json.loads((large / "model.safetensors.index.json").read_text(encoding="utf-8"))
    names = sorted(path.name for path in large.glob("*.safetensors"))
    assert len(names) > 2
    assert names == [f"model-{n:05}-of-{len(names):05}.safetensors" for n in range(1, len(names) + 1)]
    total = 0
    for name in names:
        with safe_open(large / name, framework="pt") as file:
            held = {key: file.get_tensor(key).nbytes for key in file.keys()}  # noqa: SIM118  (no mapping)
        assert held.keys() == {key for key, where in index["weight_map"].items() if where == name}
        assert sum(held.values()) <= SHARD_BYTES or len(held) == 1
        total += sum(held.values())
    assert index["metadata"]["total_size"] == total


def test_equal_arguments_give_equal_weights(large: Path, tmp_path: Path):
    write_large(tmp_path / "again", SHAPE, seed=3)
    first, second = weights(large), weights(tmp_path / "again")
    assert all(torch.equal(first[name], second[name]) for name in first)
    write_large(tmp_path / "other", SHAPE, seed=4)
    other = weights(tmp_path / "other")
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_transformers_loads_it(large: Path):
    model = transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(large, dtype="auto")
    ours = weights(large)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, ours[name].to(parameter.dtype)), name
    assert set(model.speaker_map) == {"Chelsie", "Ethan"}
    assert model.config.talker_config.rope_parameters["mrope_section"] == [8, 8, 0]
    assert model.thinker.dtype == torch.bfloat16


def test_the_released_shapes_are_about_as_large_as_released():
    config = model_config(RELEASED_3B, user_token=872, dtype="bfloat16")
    with torch.device("meta"):
        model = transformers.Qwen2_5OmniForConditionalGeneration(config)

    def millions(part: torch.nn.Module) -> int:
        return round(sum(each.numel() for each in part.parameters()) / 1e6)

    assert config.thinker_config.vision_config.fullatt_block_indexes == [7, 15, 23, 31]
    found = [millions(part) for part in (model.thinker, model.talker, model.token2wav)]
    # Together 12.0 GB in their dtypes; the released repository has 12 GB.
    assert found == [4703, 385, 449]
