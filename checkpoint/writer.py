"""Writes a whole checkpoint, completely or not at all."""

import dataclasses
import io
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from checkpoint import tokenizer, weights
from checkpoint.config import model_config, write_processors
from checkpoint.shape import TINY, CheckpointShape
from checkpoint.weights import generator_for
from omnirelay.errors import CheckpointError, OutputError
from shared.vllm.torchvision_compat import declare_missing_operators

# Marks a directory as written by this program, which may therefore be replaced, and says from what.
RECIPE_FILE = "checkpoint_recipe.json"

_logger = logging.getLogger(__name__)


def write_checkpoint(directory: Path, shape: CheckpointShape = TINY, seed: int = 0) -> None:
    """Write a random Qwen2.5-Omni checkpoint in the released layout; equal arguments give equal bytes.

    ``directory`` must be new, empty, or an earlier checkpoint of this function, which is then replaced.
    The files are written beside it and moved there last, so a directory of that name is always complete.
    Raises :class:`CheckpointError` for any other directory and for a shape that cannot be built, and
    :class:`OutputError` if the files cannot be written.
    """
    shape.validate()
    declare_missing_operators()
    with complete_directory(directory) as partial:
        _write_files(partial, shape, seed)


@contextmanager
def complete_directory(directory: Path) -> Iterator[Path]:
    """Give a directory to write to; what was written takes the place of ``directory`` if nothing was raised.

    Raises:
        CheckpointError: ``directory`` holds anything but a checkpoint of this package.
        OutputError: The files cannot be written.
    """
    _refuse_foreign(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
    except OSError as error:
        raise OutputError(f"cannot write the checkpoint {directory}: {error.strerror}") from error
    try:
        yield partial
        _give_ordinary_modes(partial)
        _replace(directory, partial)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise OutputError(f"cannot write the checkpoint {directory}: {reason or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _give_ordinary_modes(directory: Path) -> None:
    """Apply the umask: safetensors and mkdtemp create files that only their owner may read."""
    umask = os.umask(0)
    os.umask(umask)
    directory.chmod(0o777 & ~umask)
    for path in directory.iterdir():
        path.chmod(0o666 & ~umask)


def _refuse_foreign(directory: Path) -> None:
    if not os.path.lexists(directory) or (directory / RECIPE_FILE).is_file():
        return
    if not directory.is_dir():
        raise CheckpointError(f"{directory} exists and is not a directory; name another place")
    if any(directory.iterdir()):
        raise CheckpointError(
            f"{directory} holds files that are not a checkpoint written here; empty it or name another place"
        )


def _replace(directory: Path, complete: Path) -> None:
    if not (directory / RECIPE_FILE).is_file():
        complete.rename(directory)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old-", dir=directory.parent))
    directory.rename(old)
    complete.rename(directory)
    shutil.rmtree(old)


def _write_files(directory: Path, shape: CheckpointShape, seed: int) -> None:
    with step("tokenizer"):
        trained = tokenizer.build_tokenizer(shape.vocabulary.trained, shape.vocabulary.ids.tokens())
        tokenizer.write_tokenizer(directory, trained, shape.thinker["max_position_embeddings"])
    config = model_config(shape, tokenizer.user_id(trained))
    with step("layers"), torch.random.fork_rng(devices=[]):
        model = transformers.Qwen2_5OmniForConditionalGeneration(config).eval()
    ids = shape.vocabulary.ids
    with step(f"thinker, {weights.parameters_of(model.thinker) / 1e6:.1f} million parameters"):
        words, ends = tokenizer.word_ids(trained), tokenizer.sentence_end_ids(trained)
        weights.fill_thinker(model.thinker, ids, words, ends, generator_for(seed, "thinker"))
    with step(f"talker, {weights.parameters_of(model.talker) / 1e6:.1f} million parameters"):
        weights.fill_talker(model.talker, shape.dit["num_embeds"], generator_for(seed, "talker"))
    voices = weights.make_voices(shape, seed)
    with step(f"token2wav, {weights.parameters_of(model.token2wav) / 1e6:.1f} million parameters"):
        first = next(iter(voices.values()))
        weights.fill_token2wav(model.token2wav, first, generator_for(seed, "token2wav"))
    with step("files"):
        model.save_pretrained(directory)
        # save_pretrained names the class; the released checkpoints name the model, and so do we.
        config.architectures = ["Qwen2_5OmniModel"]
        config.save_pretrained(directory)
        # After save_pretrained, which writes a generation config of its own.
        write_processors(directory, shape)
        write_voices(directory, voices)
        write_recipe(directory, dataclasses.asdict(shape), seed)


def write_voices(directory: Path, voices: dict[str, dict[str, Any]]) -> None:
    """Write ``spk_dict.pt``."""
    # Not into the file: PyTorch does not tell why one cannot be written.
    packed = io.BytesIO()
    torch.save(voices, packed)
    (directory / "spk_dict.pt").write_bytes(packed.getbuffer())


def write_recipe(directory: Path, shape: dict[str, Any], seed: int) -> None:
    """Write what a checkpoint was made from."""
    recipe = {"seed": seed, "shape": shape}
    (directory / RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")


@contextmanager
def step(what: str) -> Iterator[None]:
    """Log how long something took."""
    start = time.monotonic()
    yield
    _logger.info("%s (%.1f s)", what, time.monotonic() - start)
