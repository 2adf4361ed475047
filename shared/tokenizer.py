"""A checkpoint's tokenizer: byte-level BPE, as every Qwen checkpoint has it."""

import json
import os
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from omnirelay.errors import CheckpointError

TOKENIZER: Final = "tokenizer.json"
SLOW_FILES: Final = ("vocab.json", "merges.txt", "tokenizer_config.json")
"""What a checkpoint may have instead of it."""
_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How Qwen2 splits text before byte pairs are merged; the same expression as in the released tokenizer."""


def tokenizer_files(directory: Path) -> tuple[str, ...]:
    """Names of the files that a checkpoint's tokenizer is read from."""
    slow = not (directory / TOKENIZER).is_file() and (directory / SLOW_FILES[0]).is_file()
    return SLOW_FILES if slow else (TOKENIZER,)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load a checkpoint's tokenizer; raises CheckpointError if a file is missing or damaged."""
    files = tokenizer_files(directory)
    paths = [directory / name for name in files]
    if absent := [path for path in paths if not path.is_file()]:
        raise CheckpointError(f"the checkpoint lacks {absent[0]}")
    # A batch of one needs no threads of the tokenizer's own, and children no warning of them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = Tokenizer.from_file(str(paths[0])) if files == (TOKENIZER,) else _assembled(*paths)
    except Exception as error:
        # The library has no class for it.
        raise CheckpointError(f"{paths[0]} is not a tokenizer: {error}") from error
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        raise CheckpointError(f"{paths[0]}: its decoder must be ByteLevel, as in every Qwen checkpoint")
    return tokenizer


def qwen2_tokenizer(model: BPE) -> Tokenizer:
    """Qwen2's tokenizer with these byte pairs."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _assembled(vocabulary: Path, merges: Path, config: Path) -> Tokenizer:
    """As transformers does it."""
    tokenizer = qwen2_tokenizer(BPE.from_file(str(vocabulary), str(merges)))
    added = json.loads(config.read_text(encoding="utf-8"))["added_tokens_decoder"]
    for index in sorted(added, key=int):
        token = AddedToken(**added[index])
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != int(index):
            raise ValueError(f"{config.name}: {token.content!r} cannot have the id {index}")
    return tokenizer
