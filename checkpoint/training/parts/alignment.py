"""Trains the audio encoder on which word is said where: its outputs are to resemble the text's embeddings.

The reply alone says too little about a recording for the encoder to learn from it.  Where a word lies is
guessed from the number of its letters, which is near enough for a start; the reply decides in the end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from checkpoint.training.parts.batches import Batch
from checkpoint.training.parts.vocabulary import tokenizer

_SHARPNESS = 20.0
_NORM_WEIGHT = 0.1


@contextmanager
def heard(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect what the thinker's audio encoder returns, ``[audio tokens of the batch, width]`` a call."""
    collected: list[torch.Tensor] = []
    hook = model.audio_tower.register_forward_hook(
        lambda _module, _inputs, output: collected.append(output.last_hidden_state)
    )
    try:
        yield collected
    finally:
        hook.remove()


def words_loss(model: Any, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the cross-entropy of the word at each output, and how far the outputs' norm is off.

    Args:
        model: the thinker; its text embedding is the classifier, and not trained by this loss.
        outputs: of the audio encoder, ``[audio tokens of the batch, width]``.
        batch: that was encoded.
    """
    embedding = model.model.embed_tokens
    outputs, rows = outputs.float(), embedding.weight.detach().float()
    scores = _SHARPNESS * functional.normalize(outputs, dim=-1) @ functional.normalize(rows, dim=-1).T
    lengths = (batch.inputs["input_ids"] == model.config.audio_token_index).sum(-1).tolist()
    words = [words_at(text, length) for text, length in zip(batch.spoken, lengths, strict=True)]
    # The decoder's layers add to what they read: larger than text, audio would drown what they add.
    excess = torch.log(outputs.norm(dim=-1) / rows.norm(dim=-1).mean())
    return (
        functional.cross_entropy(scores, embedding.index[torch.cat(words)])
        + _NORM_WEIGHT * excess.square().mean()
    )


def words_at(text: str, length: int) -> torch.Tensor:
    """Return the token that is probably being said at each of ``length`` moments of equal duration."""
    words = tokenizer().encode(f" {text}", add_special_tokens=False)
    ends = torch.tensor([end for _, end in words.offsets])
    moments = (torch.arange(length) + 0.5) / length * ends[-1]
    return torch.tensor(words.ids)[torch.searchsorted(ends, moments, right=True)]
