"""Codec ids: k-means over pairs of mel frames, normalized per voice.

A code is two frames, 20 ms.  Ids start at one, because the DiT keeps zero for a code that was dropped.
"""

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from labs.training.data import mel
from labs.training.data.corpus import FRAMES_PER_CODE, VOICES, SpeechCorpus
from labs.training.files import replacing

COUNT = 1024
_ROUNDS = 25
_SEED = 0
_CHUNK = 16_384
# Neighbouring pairs are similar, so a subset suffices.
_STRIDE = 4

_logger = logging.getLogger(__name__)


def make_codes(corpus: SpeechCorpus, path: Path, count: int = COUNT) -> npt.NDArray[np.int64]:
    """Return the codec id of every pair of frames of the corpus, computed unless ``path`` holds them."""
    if not path.is_file():
        pairs, trained = _normalized_pairs(corpus)
        centres = _cluster(pairs[trained][::_STRIDE], count)
        ids = _nearest(pairs, centres) + 1
        _logger.info("mean distance of held-out frames: %.3f", _distance(pairs[~trained], centres))
        with replacing(path) as partial:
            save_file({"ids": ids.to(torch.int16), "centres": centres}, partial)
    ids = load_file(path)["ids"]
    result: npt.NDArray[np.int64] = ids.numpy().astype(np.int64)
    return result


def _normalized_pairs(corpus: SpeechCorpus) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all pairs of frames ``[codes, 160]``, and which of them are for training."""
    pairs = torch.from_numpy(corpus.mels.astype(np.float32).reshape(-1, FRAMES_PER_CODE, mel.BINS))
    trained = torch.zeros(len(pairs), dtype=torch.bool)
    for voice in VOICES:
        ours = torch.zeros_like(trained)
        for item in corpus.of(voice):
            ours[item.first : item.first + item.codes] = True
        trained |= ours
        mean, deviation = pairs[ours].mean((0, 1)), pairs[ours].std((0, 1)).mean()
        for item in (*corpus.of(voice), *corpus.of(voice, held_out=True)):
            span = slice(item.first, item.first + item.codes)
            pairs[span] = (pairs[span] - mean) / deviation
    return pairs.flatten(1), trained


def _nearest(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    half_squares = centres.square().sum(1) / 2
    chunks = [(chunk @ centres.T - half_squares).argmax(1) for chunk in points.split(_CHUNK)]
    return torch.cat(chunks)


def _distance(points: torch.Tensor, centres: torch.Tensor) -> float:
    return float((points - centres[_nearest(points, centres)]).abs().mean())


def _cluster(points: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` centres of Lloyd's algorithm; an empty cluster restarts at a random point."""
    generator = torch.Generator().manual_seed(_SEED)
    centres = points[torch.randperm(len(points), generator=generator)[:count]].clone()
    for _ in range(_ROUNDS):
        nearest = _nearest(points, centres)
        sizes = torch.bincount(nearest, minlength=count)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = sums / sizes.clamp(min=1)[:, None]
        empty = (sizes == 0).nonzero().flatten()
        centres[empty] = points[torch.randint(len(points), (len(empty),), generator=generator)]
    return centres
