"""What the doctor's tests have in common: files of checkpoints without a model, and findings."""

import json
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ops.doctor.finding import Finding

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_omni",
    "dtype": "float32",
    "thinker_config": {
        "text_config": {
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
        }
    },
    "talker_config": {
        "head_dim": 32,
        "embedding_size": 128,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    },
}
SHARDS = {
    "model-00001-of-00002.safetensors": {"thinker.a": 1000, "talker.a": 500},
    "model-00002-of-00002.safetensors": {"thinker.b": 24, "token2wav.a": 100},
}
INDEX = "model.safetensors.index.json"


def write_weights(path: Path, tensors: dict[str, int]) -> None:
    """Write float32 tensors of so many elements."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, count in tensors.items():
        tensor: Any = {"dtype": "F32", "shape": [count], "data_offsets": [end, end + 4 * count]}
        header[name] = tensor
        end += 4 * count
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def write_speakers(directory: Path) -> None:
    """Write an archive like torch.save's, whose pickle nobody here may read."""
    with zipfile.ZipFile(directory / "spk_dict.pt", "w") as archive:
        archive.writestr("spk_dict/data.pkl", b"\x80\x02}.")
        archive.writestr("spk_dict/data/0", bytes(4096))


def write_model(directory: Path, sharded: bool = True) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text("{}")
    write_speakers(directory)
    if not sharded:
        merged = {name: count for tensors in SHARDS.values() for name, count in tensors.items()}
        write_weights(directory / "model.safetensors", merged)
        return directory
    for name, tensors in SHARDS.items():
        write_weights(directory / name, tensors)
    places = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}
    (directory / INDEX).write_text(json.dumps({"weight_map": places}))
    return directory


def only(findings: Iterable[Finding], level: str, *words: str) -> Finding:
    """The only finding, which must be of this level, and say these words."""
    (finding,) = findings
    assert (finding.level, [each for each in words if each not in finding.what]) == (level, []), finding
    assert finding.level == "ok" or finding.advice
    return finding


def levels(findings: Iterable[Finding]) -> list[str]:
    return [finding.level for finding in findings]
