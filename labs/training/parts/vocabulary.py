"""Text as the speaking checkpoint reads it: its tokenizer, and the rows of its vocabulary that are used.

Every word of the world is one token.  All tokens that the world has no use for share one row of the
embedding, which training shows as whatever is not known; so a checkpoint need not hold theirs.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, normalizers
from torch import nn
from torch.nn import functional

from checkpoint.config import CODEC_IDS, model_config, write_processors
from checkpoint.shape import SPEAKING, CheckpointShape
from checkpoint.tokenizer import build_tokenizer, training_lines, user_id, write_tokenizer
from checkpoint.writer import complete_directory
from labs.training.data import world

SYSTEM_PROMPT = "You are a helpful assistant."
_REPEATED = 40


@functools.cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer of the checkpoint: every word of the world is one token, in any case."""
    lines = [*training_lines(), *(line for line in _world_lines() for _ in range(_REPEATED))]
    built = build_tokenizer(SPEAKING.vocabulary.trained, SPEAKING.vocabulary.ids.tokens(), lines)
    built.normalizer = normalizers.Sequence([built.normalizer, normalizers.Lowercase()])
    return built


def _world_lines() -> list[str]:
    words = world.vocabulary()
    return [
        " ".join(["", *words]),
        *(f"{word}\n" for word in words),
        *(f"{word.capitalize()}\n" for word in words),
    ]


@functools.cache
def used_ids() -> tuple[int, ...]:
    """Return the text ids that the world uses, in order; all others share one row."""
    shape = SPEAKING.vocabulary
    texts = [
        *_world_lines(),
        *"0123456789",
        *(f" {digit}" for digit in range(10)),
        *"+-*x?.!,",
        " +",
        " -",
        " *",
        " x",
    ]
    texts += [f"system\n{SYSTEM_PROMPT}\n", "user\n", "assistant\n", "\n"]
    found = {index for text in texts for index in tokenizer().encode(text, add_special_tokens=False).ids}
    return tuple(sorted(found | set(shape.ids.tokens().values())))


def used_codes(shape: CheckpointShape = SPEAKING) -> tuple[int, ...]:
    """Return the codec ids that the talker reads or writes, in order."""
    return (*range(1, shape.dit["num_embeds"]), *sorted(CODEC_IDS.values()))


def write_processor(directory: Path, shape: CheckpointShape = SPEAKING) -> None:
    """Write the config, the tokenizer's files and the processors' configs, all but the weights."""
    write_tokenizer(directory, tokenizer(), shape.thinker["max_position_embeddings"])
    config(shape).save_pretrained(directory)
    write_processors(directory, shape)


def config(shape: CheckpointShape = SPEAKING) -> Any:
    """Return the config of the whole model."""
    return model_config(shape, user_id(tokenizer()))


def load_processor(directory: Path) -> Any:
    """Return the processor of the checkpoint, from ``directory``, where it is written if nothing is there."""
    if not directory.exists():
        with complete_directory(directory) as partial:
            write_processor(partial)
    return transformers.Qwen2_5OmniProcessor.from_pretrained(directory)


class SharedRows(nn.Module):
    """A matrix of one row for each used id, and one more that all other ids share."""

    index: torch.Tensor

    def __init__(self, used: Iterable[int], size: int, width: int) -> None:
        super().__init__()
        kept = torch.tensor(sorted(used))
        index = torch.full((size,), len(kept))
        index[kept] = torch.arange(len(kept))
        self.register_buffer("index", index, persistent=False)
        self.unused = size - len(kept)
        self.weight = nn.Parameter(torch.randn(len(kept) + 1, width) * 0.02)

    def whole(self) -> torch.Tensor:
        """Return the matrix with a row for every id."""
        return self.weight[self.index]

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows of a matrix that has one for every id."""
        rows = torch.empty_like(self.weight)
        rows[self.index] = whole
        return rows


class SharedEmbedding(SharedRows):
    """An embedding of such rows."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., width]."""
        return functional.embedding(self.index[ids], self.weight)


class SharedHead(SharedRows):
    """A head of such rows; it gives one logit for all unused ids together, and targets are :attr:`index`."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., rows]."""
        logits = functional.linear(hidden, self.weight)
        several = torch.zeros_like(self.weight[:, 0])
        several[-1] = float(self.unused)
        # As the sum over equal rows: exp(a) n is exp(a + log n).
        return logits + torch.log(several.clamp(min=1.0))
