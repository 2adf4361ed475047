"""Recordings of spoken questions for the audio encoder: many voices, synthesized once and kept on disk."""

import json
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from labs.training.data.augmentation import RATE
from labs.training.data.dialogues import Spoken, SpokenQuestions
from labs.training.data.synthesis import Speak, SynthesizerVoice, Wave, synthesize
from labs.training.files import replacing

QUESTIONS = 20_000
_SEED = 0
_WORKERS = 2
_FLITE = ("slt", "rms", "kal16", "kal")
_VARIANTS = (
    "f1 f2 f3 f5 m1 m2 m3 m5 m6 m8 Alex Alicia Andy Annie Denis Gene Henrique Hugo Jacky Lee Marco "
    "Mario Michael Mike Storm Tweaky adam anika antonio aunty belinda benjamin boris caleb david ed "
    "edward grandma grandpa gustave iven john kaukovalta klatt klatt3 linda marcelo max michel miguel "
    "pablo paul pedro rob robert sandro shelby steph travis victor zac"
)
_ESPEAK = (
    *("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-029", "en-gb-x-gbclan", "en-gb-x-gbcwmd"),
    *(f"en-us+{variant}" for variant in _VARIANTS.split()),
    *(f"en+{variant}" for variant in _VARIANTS.split()),
)
# Voices excluded from training.
UNHEARD = (
    SynthesizerVoice("flite", "awb"),
    SynthesizerVoice("espeak", "en-us+f4"),
    SynthesizerVoice("espeak", "en+m4"),
    SynthesizerVoice("espeak", "en-us+m7"),
    SynthesizerVoice("espeak", "en-gb-x-rp+Andrea"),
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Clip:
    """One recording of a question; samples are counted in the whole file."""

    question: str
    reply: str
    voice: str
    first: int
    samples: int

    @property
    def spoken(self) -> Spoken:
        """What is asked."""
        return Spoken(self.question, self.reply)


class Hearing:
    """Recordings on disk, 16 kHz, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        entries = json.loads((directory / "index.json").read_text(encoding="utf-8"))
        self.clips = [Clip(**entry) for entry in entries]
        self._waves: npt.NDArray[np.int16] = np.load(directory / "waves.npy", mmap_mode="r")

    def wave(self, clip: Clip) -> Wave:
        """Return a recording, in [-1, 1]."""
        return self._waves[clip.first : clip.first + clip.samples].astype(np.float32) / np.float32(32768)


def trained_voice(generator: random.Random) -> SynthesizerVoice:
    """Draw a voice for training; a third of the time one of flite's, which sound the most natural."""
    speed, pitch = generator.uniform(0.75, 1.3), generator.uniform(0.5, 1.7)
    if generator.random() < 0.33:
        return SynthesizerVoice("flite", generator.choice(_FLITE), speed)
    return SynthesizerVoice("espeak", generator.choice(_ESPEAK), speed, pitch)


def make_hearing(directory: Path, questions: int = QUESTIONS, speak: Speak = synthesize) -> Hearing:
    """Synthesize the recordings into ``directory``, unless they are there; takes minutes."""
    if not (directory / "index.json").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory, questions, speak)
    return Hearing(directory)


def _write(directory: Path, questions: int, speak: Speak) -> None:
    generator = random.Random(_SEED)
    source = SpokenQuestions()
    jobs = [(trained_voice(generator), source.draw(generator)) for _ in range(questions)]
    with ThreadPoolExecutor(_WORKERS) as workers:
        waves = list(workers.map(lambda job: _recorded(speak, *job), jobs))
    clips, first = [], 0
    for (voice, spoken), wave in zip(jobs, waves, strict=True):
        clips.append(Clip(spoken.question, spoken.reply, voice.name, first, len(wave)))
        first += len(wave)
    with replacing(directory / "waves.npy") as path:
        np.save(path, np.concatenate(waves))
    with replacing(directory / "index.json") as path:
        path.write_text(json.dumps([asdict(clip) for clip in clips]), encoding="utf-8")
    _logger.info("%d questions, %.0f minutes", len(clips), first / RATE / 60)


def _recorded(speak: Speak, voice: SynthesizerVoice, spoken: Spoken) -> npt.NDArray[np.int16]:
    wave = speak(voice, spoken.question, RATE)
    return (np.clip(wave * (0.7 / np.abs(wave).max()), -1, 1) * 32767).astype(np.int16)
