"""Writes random checkpoints of released sizes, layer by layer: the whole would not fit into memory.

Thinker and talker are in bfloat16, token2wav in float32, in shards with an index, as released.  Unlike those
of :mod:`checkpoint.writer` the thinker's replies are not legible, and no text or speech ends by itself.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from checkpoint import tokenizer, weights
from checkpoint.config import model_config, write_processors
from checkpoint.shape import RELEASED_3B, CheckpointShape
from checkpoint.weights import fill_layer, generator_for
from checkpoint.writer import complete_directory, step, write_recipe, write_voices
from shared.vllm.torchvision_compat import declare_missing_operators

DTYPE: Final = torch.bfloat16
SHARD_BYTES: Final = 5 * 10**9
"""Most bytes of a file, unless one tensor has more."""


def write_large(
    directory: Path, shape: CheckpointShape = RELEASED_3B, seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a random checkpoint in shards; equal arguments give equal bytes.

    Takes memory for one shard and for token2wav.  ``directory`` is as for
    :func:`checkpoint.writer.write_checkpoint`, and so are the errors.
    """
    shape.validate()
    declare_missing_operators()
    with complete_directory(directory) as partial:
        trained = tokenizer.build_tokenizer(shape.vocabulary.trained, shape.vocabulary.ids.tokens())
        tokenizer.write_tokenizer(partial, trained, shape.thinker["max_position_embeddings"])
        config = model_config(shape, tokenizer.user_id(trained), str(DTYPE).removeprefix("torch."))
        config.save_pretrained(partial)
        write_processors(partial, shape)
        voices = weights.make_voices(shape, seed)
        write_voices(partial, voices)
        shards = _Shards(partial, shard_bytes)
        with torch.random.fork_rng(devices=[]):
            for name, tensor in _tensors(config, voices, seed):
                shards.add(name, tensor)
        shards.close()
        write_recipe(partial, asdict(shape), seed)


def _tensors(config: Any, voices: dict[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Draw the weights; those of a layer are let go before the next are drawn."""
    with torch.device("meta"):
        model = transformers.Qwen2_5OmniForConditionalGeneration(config)
    for part in ("thinker", "talker"):
        generator = generator_for(seed, part)
        with step(part):
            for path, layer in getattr(model, part).named_modules(prefix=part):
                yield from _drawn(path, layer, generator)
    with step("token2wav"):
        token2wav = transformers.Qwen2_5OmniToken2WavModel(config.token2wav_config).float().eval()
        weights.fill_token2wav(token2wav, next(iter(voices.values())), generator_for(seed, "token2wav"))
        for name, tensor in token2wav.state_dict().items():
            yield f"token2wav.{name}", tensor


def _drawn(path: str, layer: nn.Module, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    if not list(layer.parameters(recurse=False)):
        return
    layer.to_empty(device="cpu", recurse=False)
    # Drawn in float32, as everywhere, whatever they are kept in.
    layer.float()
    fill_layer(layer, generator)
    drawn = {f"{path}.{name}": value.data.to(DTYPE) for name, value in layer.named_parameters(recurse=False)}
    layer.to_empty(device="meta", recurse=False)
    yield from drawn.items()


class _Shards:
    """Collects tensors, and writes a file whenever there are enough."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._total = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one more tensor."""
        if self._waiting and self._bytes + tensor.nbytes > self._most_bytes:
            self._write()
        self._waiting[name] = tensor
        self._bytes += tensor.nbytes

    def close(self) -> None:
        """Write the rest and the index; only now it is known how many files there are."""
        self._write()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files, start=1):
            file = f"model-{number:05}-of-{len(self._files):05}.safetensors"
            (self._directory / _partial(number)).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self._directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _write(self) -> None:
        self._files.append(list(self._waiting))
        path = self._directory / _partial(len(self._files))
        tensors = {name: tensor.contiguous() for name, tensor in self._waiting.items()}
        save_file(tensors, path, metadata={"format": "pt"})
        self._total += self._bytes
        self._waiting, self._bytes = {}, 0


def _partial(number: int) -> str:
    return f"model-{number:05}.safetensors"
