"""Trains the encoders on what is said and seen where: their outputs are to resemble the text's embeddings.

The reply alone says too little about a recording or an image for an encoder to learn from it.  Where nothing
is said, and where a thing lies in an image, is known.  Where a word lies in what is said is guessed from the
number of its letters, or found by the outputs of an encoder that is trained already: one that is not strays
from a guess that was right.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from labs.training.data.augmentation import SILENT
from labs.training.data.images import Scene, Thing
from labs.training.data.world import COLOURS, SHAPES
from labs.training.parts.batches import Batch
from labs.training.parts.vocabulary import tokenizer

_SHARPNESS = 20.0
_NORM_WEIGHT = 0.1
_INNER = 0.8
# Nats that a whole recording's distance from where a word is guessed to be counts.
_GUESS_WEIGHT = 10.0


@contextmanager
def encoded(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Collect what the encoders return as ``audio`` and ``image``, ``[tokens of the batch, width]``."""
    collected: dict[str, torch.Tensor] = {}

    def collect(kind: str) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            collected[kind] = output.last_hidden_state if kind == "audio" else output.pooler_output

        return hook

    hooks = [
        model.audio_tower.register_forward_hook(collect("audio")),
        model.visual.register_forward_hook(collect("image")),
    ]
    try:
        yield collected
    finally:
        for each in hooks:
            each.remove()


def words_loss(model: Any, outputs: torch.Tensor, batch: Batch, *, finds: bool = False) -> torch.Tensor:
    """Return the cross-entropy of the word at each output, and how far the outputs' norm is off.

    Args:
        model: the thinker; its text embedding is the classifier, and not trained by this loss.
        outputs: of the audio encoder, ``[audio tokens of the batch, width]``.
        batch: that was encoded.
        finds: whether the outputs say where each word is.
    """
    embedding = model.model.embed_tokens
    outputs, rows = outputs.float(), embedding.weight.detach().float()
    lengths = _runs(batch.inputs["input_ids"] == model.config.audio_token_index)
    # A codec or a padding may add a token at the end.
    moments = [
        functional.pad(each[:length], (0, max(0, length - len(each))), value=SILENT)
        for each, length in zip(batch.moments, lengths, strict=True)
    ]
    said = torch.cat(moments) > SILENT
    if not said.any():
        return _excess(outputs, rows)
    scores = _scores(outputs[said], rows)
    spoken = [each[each > SILENT] for each in moments]
    found = scores.detach().float().log_softmax(-1).cpu().split([len(each) for each in spoken])
    index, targets = embedding.index.cpu(), []
    for text, each, likely in zip(batch.spoken, spoken, found, strict=True):
        ids, beside = guessed(text, each)
        heard = likely[:, index[ids]].numpy() if finds else 0.0
        targets.append(index[ids][path(heard - _GUESS_WEIGHT * beside)])
    return functional.cross_entropy(scores, torch.cat(targets).to(outputs.device)) + _excess(outputs, rows)


def _runs(marked: torch.Tensor) -> list[int]:
    """Return the length of each run of true values in the rows of ``marked``; none begins or ends a row."""
    begins = marked[:, 1:] & ~marked[:, :-1]
    lengths: list[int] = torch.bincount(begins.flatten().cumsum(0)[marked[:, 1:].flatten()])[1:].tolist()
    return lengths


def things_loss(model: Any, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the cross-entropies of colour and shape at the outputs that show a thing, and of the norm.

    Args:
        model: the thinker.
        outputs: of the image encoder, ``[image tokens of the batch, width]``.
        batch: that was encoded.
    """
    embedding = model.model.embed_tokens
    outputs, rows = outputs.float(), embedding.weight.detach().float()
    merged = model.config.vision_config.spatial_merge_size
    grids = (batch.inputs["image_grid_thw"][:, 1:] // merged).tolist()
    things = [
        thing for scene, grid in zip(batch.scenes, grids, strict=True) for thing in things_at(scene, *grid)
    ]
    shown = torch.tensor([place for place, thing in enumerate(things) if thing is not None])
    found = [thing for thing in things if thing is not None]
    losses = _excess(outputs, rows)
    for words, named in (
        (COLOURS, [COLOURS.index(thing.colour) for thing in found]),
        (SHAPES, [SHAPES.index(thing.shape) for thing in found]),
    ):
        ids = torch.tensor([_token(word) for word in words])
        losses = losses + functional.cross_entropy(
            _scores(outputs[shown], rows[embedding.index[ids]]), torch.tensor(named, device=outputs.device)
        )
    return losses


def _scores(outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return _SHARPNESS * functional.normalize(outputs, dim=-1) @ functional.normalize(rows, dim=-1).T


def _excess(outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    # The decoder's layers add to what they read: larger than text, audio would drown what they add.
    return _NORM_WEIGHT * torch.log(outputs.norm(dim=-1) / rows.norm(dim=-1).mean()).square().mean()


def _token(word: str) -> int:
    ids: list[int] = tokenizer().encode(f" {word}", add_special_tokens=False).ids
    return ids[0]


def things_at(scene: Scene, rows: int, columns: int) -> list[Thing | None]:
    """Return the thing that each cell of an image shows, row by row; none where there is mostly ground."""
    return [
        _thing_at(scene, (column + 0.5) / columns, (row + 0.5) / rows, 0.5 / columns, 0.5 / rows)
        for row in range(rows)
        for column in range(columns)
    ]


def _thing_at(scene: Scene, x: float, y: float, half_width: float, half_height: float) -> Thing | None:
    for thing in scene.things:
        beside = max(abs(x - thing.x) - half_width, 0.0), max(abs(y - thing.y) - half_height, 0.0)
        if math.hypot(*beside) < _INNER * thing.radius:
            return thing
    return None


def guessed(text: str, moments: torch.Tensor) -> tuple[torch.Tensor, npt.NDArray[np.float32]]:
    """Return a text's tokens, and how far from each lie ``moments``, from 0 to 1: ``[moments, tokens]``."""
    words = tokenizer().encode(f" {text}", add_special_tokens=False)
    ends = torch.tensor([float(end) for _, end in words.offsets]) / words.offsets[-1][1]
    starts = functional.pad(ends[:-1], (1, 0))
    beside = (starts - moments[:, None]).relu() + (moments[:, None] - ends).relu()
    return torch.tensor(words.ids), beside.numpy()


def said_tokens(text: str, likely: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the row of the token that is said at each moment, and of the one after it: ``[moments, 2]``.

    Args:
        text: what is said.
        likely: log likelihoods of each row, ``[moments, rows]``.
        index: the row of each token.
    """
    ids, beside = guessed(text, (torch.arange(len(likely)) + 0.5) / len(likely))
    rows = index[ids]
    found = torch.from_numpy(path(likely[:, rows].numpy() - _GUESS_WEIGHT * beside))
    return torch.stack([rows[found], rows[(found + 1).clamp(max=len(rows) - 1)]], dim=-1)


def path(likely: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the likeliest token of each moment, where every token is said, one after the other.

    Args:
        likely: log likelihoods, ``[moments, tokens]``; with fewer moments than tokens, some are left out.
    """
    moments, tokens = likely.shape
    if moments < tokens:
        return likely.argmax(axis=1)
    best, next_begins = np.full(tokens, -np.inf), np.zeros((moments, tokens), bool)
    best[0] = 0.0
    for moment, row in enumerate(likely):
        before = np.append(-np.inf, best[:-1]) if moment else best
        next_begins[moment] = before > best
        best = np.maximum(before, best) + row
    found, token = np.zeros(moments, np.int64), tokens - 1
    for moment in reversed(range(moments)):
        found[moment] = token
        token -= int(next_begins[moment, token])
    return found
