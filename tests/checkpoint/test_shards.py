"""A stage reads the files of its own weights, where a checkpoint has several."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import default_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from services.families.qwen2_5_omni.talker import ConditionedTalker
from services.families.qwen2_5_omni.thinker import SpeakingThinker
from services.families.qwen2_5_omni.token2wav.model import Token2WavForSynthesis
from shared.checkpoints import WEIGHT_INDEX

SHARDS = {"1": ["thinker"], "2": ["thinker", "talker"], "3": ["talker"], "4": ["token2wav"]}
"""Whose tensors each file has; one border between stages lies within a file, as in released checkpoints."""
MODELS = {"thinker": SpeakingThinker, "talker": ConditionedTalker, "token2wav": Token2WavForSynthesis}


@pytest.fixture(scope="module")
def sharded(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of the tiny checkpoint in four files, with their index."""
    directory = tmp_path_factory.mktemp("sharded")
    shards: dict[str, dict[str, Any]] = {number: {} for number in SHARDS}
    for count, (name, tensor) in enumerate(sorted(load_file(tiny_checkpoint / "model.safetensors").items())):
        fitting = [number for number, stages in SHARDS.items() if name.partition(".")[0] in stages]
        shards[fitting[count % len(fitting)]][name] = tensor
    for number, tensors in shards.items():
        save_file(tensors, directory / f"{number}.safetensors", metadata={"format": "pt"})
    index = {name: f"{number}.safetensors" for number, tensors in shards.items() for name in tensors}
    (directory / WEIGHT_INDEX).write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return directory


@pytest.mark.parametrize("stage", MODELS)
def test_only_files_with_own_weights_are_read(stage, sharded: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    iterate = default_loader.safetensors_weights_iterator

    def watched(files: list[str], *arguments: Any, **options: Any) -> Any:
        read.extend(Path(file).stem for file in files)
        return iterate(files, *arguments, **options)

    monkeypatch.setattr(default_loader, "safetensors_weights_iterator", watched)
    loader = DefaultModelLoader(LoadConfig(use_tqdm_on_load=False))
    source = SimpleNamespace(model=str(sharded), revision=None)
    loaded = [name for name, _ in loader.get_all_weights(source, MODELS[stage])]
    assert sorted(read) == [number for number, stages in SHARDS.items() if stage in stages]
    index = json.loads((sharded / WEIGHT_INDEX).read_text(encoding="utf-8"))["weight_map"]
    own = {name for name in index if name.startswith(f"{stage}.")}
    assert own
    assert own <= set(loaded)
