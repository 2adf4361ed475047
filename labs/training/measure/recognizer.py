"""An independent speech recognizer: pocketsphinx, with a bigram over the training sentences."""

import collections
import itertools
import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from labs.training.data.synthesis import SAMPLE_RATE, Wave
from omnirelay.errors import CheckpointError

_RATE = 16_000
_BIGRAM_SHARE = 0.8
_BACKOFF = 0.3
_MARGIN_SECONDS = 0.25
_LOUDEST = 0.6


class Recognizer:
    """Recognizes speech within the vocabulary of some sentences.

    Args:
        sentences: the text that vocabulary and bigram are estimated from.

    Raises:
        CheckpointError: pocketsphinx is not installed, or its dictionary lacks a word.
    """

    def __init__(self, sentences: Sequence[str]) -> None:
        try:
            import pocketsphinx  # noqa: PLC0415  (an extra)
        except ImportError as error:
            raise CheckpointError(
                "pocketsphinx is missing: pip install 'omnirelay-server[training]'"
            ) from error
        models = Path(pocketsphinx.get_model_path("en-us"))
        with tempfile.TemporaryDirectory(prefix="omnirelay-recognizer-") as directory:
            dictionary, grammar = Path(directory) / "words.dict", Path(directory) / "bigram.arpa"
            words = {word for text in sentences for word in text.split()}
            dictionary.write_text(_pronunciations(models / "cmudict-en-us.dict", words), encoding="utf-8")
            grammar.write_text(bigram(sentences), encoding="utf-8")
            self._decoder: Any = pocketsphinx.Decoder(
                hmm=str(models / "en-us"), dict=str(dictionary), lm=str(grammar), loglevel="FATAL"
            )

    def hear(self, wave: Wave, rate: int = SAMPLE_RATE) -> str:
        """Return the words recognized in a recording."""
        samples = np.pad(soxr.resample(wave, rate, _RATE), round(_MARGIN_SECONDS * _RATE))
        # The recognizer's models do not cover digital silence.
        samples = samples + np.random.default_rng(0).standard_normal(len(samples)) * 1e-4
        samples = samples * (_LOUDEST / np.abs(samples).max())
        self._decoder.start_utt()
        self._decoder.process_raw((samples * 32767).astype(np.int16).tobytes(), full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return "" if found is None else str(found.hypstr)


def _pronunciations(dictionary: Path, words: set[str]) -> str:
    lines = [
        line
        for line in dictionary.read_text(encoding="utf-8").splitlines()
        if line.split(maxsplit=1)[0].split("(")[0] in words
    ]
    missing = words - {line.split(maxsplit=1)[0].split("(")[0] for line in lines}
    if missing:
        raise CheckpointError(f"no pronunciation of {', '.join(sorted(missing))} in {dictionary}")
    return "\n".join(lines) + "\n"


def bigram(sentences: Iterable[str]) -> str:
    """Return a back-off bigram in ARPA's format, of the words that follow each other in ``sentences``."""
    single: collections.Counter[str] = collections.Counter()
    pairs: collections.Counter[tuple[str, str]] = collections.Counter()
    for text in sentences:
        words = ["<s>", *text.split(), "</s>"]
        single.update(words)
        pairs.update(itertools.pairwise(words))
    total = single.total()
    lines = ["\\data\\", f"ngram 1={len(single)}", f"ngram 2={len(pairs)}", "", "\\1-grams:"]
    for word, count in sorted(single.items()):
        chance = -99.0 if word == "<s>" else math.log10(count / total)
        lines.append(f"{chance:.4f} {word} {math.log10(_BACKOFF):.4f}")
    lines += ["", "\\2-grams:"]
    for (first, second), count in sorted(pairs.items()):
        lines.append(f"{math.log10(_BIGRAM_SHARE * count / single[first]):.4f} {first} {second}")
    return "\n".join([*lines, "", "\\end\\", ""])


def word_errors(wanted: str, heard: str) -> int:
    """Return the least number of words to insert, delete and replace in ``wanted`` to make it ``heard``."""
    source, target = wanted.split(), heard.split()
    row = list(range(len(target) + 1))
    for i, word in enumerate(source, 1):
        previous, row = row, [i]
        for j, other in enumerate(target, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (word != other)))
    return row[-1]


def word_error_rate(pairs: Sequence[tuple[str, str]]) -> float:
    """Return the errors of (wanted, heard) pairs for each wanted word."""
    errors = sum(word_errors(wanted, heard) for wanted, heard in pairs)
    return errors / max(1, sum(len(wanted.split()) for wanted, _ in pairs))
