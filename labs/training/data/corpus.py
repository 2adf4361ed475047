"""The speech corpus: every sentence in both voices of the checkpoint, as waves and mel spectrograms."""

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from labs.training.data import mel, world
from labs.training.data.dialogues import texts_to_read
from labs.training.data.synthesis import SAMPLE_RATE, Speak, SynthesizerVoice, Wave, synthesize
from labs.training.files import replacing
from omnirelay.errors import CheckpointError

VOICES = {"Chelsie": SynthesizerVoice("flite", "slt"), "Ethan": SynthesizerVoice("flite", "rms")}
"""The synthesizer voices that the checkpoint's voices are trained on."""
FRAMES_PER_CODE = 2
SENTENCES = 6400
_SEQUENCES = 6000
_TEXTS = 4000
_LOUDNESS = 0.08
_CODE_SAMPLES = FRAMES_PER_CODE * mel.HOP
_WORKERS = 2

Sentences = tuple[list[str], list[str]]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Utterance:
    """One sentence in one voice; ``first`` and ``codes`` count codes of the whole corpus."""

    text: str
    voice: str
    held_out: bool
    first: int
    codes: int


class SpeechCorpus:
    """The corpus on disk, memory-mapped: utterances one after the other.

    Attributes:
        utterances: in the order of the files.
        waves: int16, ``[codes * 480]``.
        mels: float16, ``[codes * 2, 80]``.
    """

    def __init__(self, directory: Path) -> None:
        index = directory / "index.json"
        if not index.is_file():
            raise CheckpointError(f"{directory} holds no speech corpus; run the part `corpus` first")
        self.utterances = [Utterance(**entry) for entry in json.loads(index.read_text(encoding="utf-8"))]
        self.waves: npt.NDArray[np.int16] = np.load(directory / "waves.npy", mmap_mode="r")
        self.mels: npt.NDArray[np.float16] = np.load(directory / "mels.npy", mmap_mode="r")

    def of(self, voice: str, *, held_out: bool = False) -> list[Utterance]:
        """Return the utterances of one voice, for training unless ``held_out``."""
        return [item for item in self.utterances if item.voice == voice and item.held_out == held_out]

    def wave(self, item: Utterance) -> Wave:
        """Return an utterance's samples, in [-1, 1]."""
        samples = self.waves[item.first * _CODE_SAMPLES : (item.first + item.codes) * _CODE_SAMPLES]
        return samples.astype(np.float32) / np.float32(32768)

    def mel(self, item: Utterance) -> npt.NDArray[np.float32]:
        """Return an utterance's log-mel frames, ``[frames, bins]``."""
        frames = slice(item.first * FRAMES_PER_CODE, (item.first + item.codes) * FRAMES_PER_CODE)
        return self.mels[frames].astype(np.float32)


def make_corpus(
    directory: Path, sentences: Sentences | None = None, speak: Speak = synthesize
) -> SpeechCorpus:
    """Synthesize the corpus into ``directory``, unless it is there; takes minutes.

    Args:
        directory: where it is kept.
        sentences: those to train with and those held out; the world's if not given.
        speak: the synthesizer.
    """
    if not (directory / "index.json").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory, sentences or _sentences(), speak)
    return SpeechCorpus(directory)


def _sentences() -> Sentences:
    trained, held_out = world.spoken_sentences(SENTENCES)
    more = [world.UNHEARD, *world.word_sequences(_SEQUENCES, shortest=1), *texts_to_read(_TEXTS)]
    return [*dict.fromkeys([*trained, *more])], held_out


def _write(directory: Path, sentences: Sentences, speak: Speak) -> None:
    trained, held_out = sentences
    utterances: list[dict[str, Any]] = []
    waves: list[npt.NDArray[np.int16]] = []
    mels: list[npt.NDArray[np.float16]] = []
    first = 0
    for voice, source in VOICES.items():
        texts = [*((text, False) for text in trained), *((text, True) for text in held_out)]
        spoken = list(_spoken(speak, source, [text for text, _ in texts]))
        gain = _LOUDNESS / float(np.sqrt(np.mean(np.concatenate(spoken) ** 2)))
        for (text, kept), wave in zip(texts, spoken, strict=True):
            codes = len(wave) // _CODE_SAMPLES
            samples = np.clip(wave[: codes * _CODE_SAMPLES] * gain, -0.99, 0.99)
            frames = mel.log_mel(torch.from_numpy(samples)[None])[0].T
            waves.append((samples * 32768).astype(np.int16))
            mels.append(frames.numpy().astype(np.float16))
            utterances.append(
                {"text": text, "voice": voice, "held_out": kept, "first": first, "codes": codes}
            )
            first += codes
        _logger.info("%s: %d sentences", voice, len(texts))
    for name, parts in (("waves.npy", waves), ("mels.npy", mels)):
        with replacing(directory / name) as path:
            np.save(path, np.concatenate(parts))
    # Written last: if the index exists, the other files do.
    with replacing(directory / "index.json") as path:
        path.write_text(json.dumps(utterances), encoding="utf-8")
    _logger.info("%.0f minutes of speech", first * _CODE_SAMPLES / SAMPLE_RATE / 60)


def _spoken(speak: Speak, voice: SynthesizerVoice, texts: list[str]) -> Iterator[Wave]:
    with ThreadPoolExecutor(_WORKERS) as workers:
        yield from workers.map(lambda text: speak(voice, text, SAMPLE_RATE), texts)
