"""Codec ids: k-means over pairs of mel frames, normalized per voice.

A code is two frames, 20 ms.  Ids start at one, because the DiT keeps zero for a code that was dropped.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from labs.training.data import mel
from labs.training.data.corpus import FRAMES_PER_CODE, VOICES, SpeechCorpus, Utterance
from labs.training.files import replacing

COUNT = 1024
SENTENCES = 2400
_ROUNDS = 25
_SEED = 0
_CHUNK = 16_384
# Neighbouring pairs are similar, so a subset suffices.
_STRIDE = 4

_logger = logging.getLogger(__name__)


def make_codes(
    corpus: SpeechCorpus, path: Path, book: SpeechCorpus, count: int = COUNT
) -> npt.NDArray[np.int64]:
    """Return the codec id of every pair of frames of the corpus, computed unless ``path`` holds them.

    Args:
        corpus: whose ids are wanted.
        path: where they are kept.
        book: what the centres are those of, so that ids mean the same whatever ``corpus`` holds.
        count: how many centres there are.
    """
    if not path.is_file():
        scales = _scales(book)
        pairs, _ = _normalized_pairs(book, scales)
        centres = _cluster(pairs[::_STRIDE], count)
        ids = torch.zeros(len(corpus.mels) // FRAMES_PER_CODE, dtype=torch.int64)
        for held_out in (False, True):
            pairs, places = _normalized_pairs(corpus, scales, held_out=held_out)
            ids[places] = _nearest(pairs, centres) + 1
            distance = (pairs - centres[ids[places] - 1]).abs().mean()
            _logger.info("mean distance of %s frames: %.3f", "held-out" if held_out else "trained", distance)
        with replacing(path) as partial:
            save_file({"ids": ids.to(torch.int16), "centres": centres}, partial)
    ids = load_file(path)["ids"]
    result: npt.NDArray[np.int64] = ids.numpy().astype(np.int64)
    return result


def _scales(book: SpeechCorpus) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return for each voice the mean of its frames ``[bins]``, and how far its frames are from it."""
    scales = {}
    for voice in VOICES:
        ours = torch.cat([_pairs(book, item) for item in book.of(voice)])
        scales[voice] = ours.mean((0, 1)), ours.std((0, 1)).mean()
    return scales


def _pairs(corpus: SpeechCorpus, item: Utterance) -> torch.Tensor:
    return torch.from_numpy(corpus.mel(item).reshape(-1, FRAMES_PER_CODE, mel.BINS))


def _normalized_pairs(
    corpus: SpeechCorpus, scales: Mapping[str, tuple[torch.Tensor, torch.Tensor]], *, held_out: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs of frames ``[codes, 160]``, and their places among those of the whole corpus."""
    items = [item for voice in VOICES for item in corpus.of(voice, held_out=held_out)]
    pairs = [(_pairs(corpus, item) - scales[item.voice][0]) / scales[item.voice][1] for item in items]
    places = [torch.arange(item.first, item.first + item.codes) for item in items]
    return torch.cat(pairs).flatten(1), torch.cat(places)


def _nearest(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    half_squares = centres.square().sum(1) / 2
    chunks = [(chunk @ centres.T - half_squares).argmax(1) for chunk in points.split(_CHUNK)]
    return torch.cat(chunks)


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
