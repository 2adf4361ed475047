"""The questions that the speaking checkpoint brings for people who try it; none was trained."""

import json
import random
from pathlib import Path

import soundfile

from labs.training.data import images
from labs.training.data.augmentation import RATE
from labs.training.data.corpus import VOICES
from labs.training.data.synthesis import Speak
from shared.starters import STARTERS_FILE

SUM, DIFFERENCE, SPOKEN = "twenty plus sixteen", "sixteen minus five", "eight plus seven"
"""Held out from training, and answered well by ``checkpoint/speaking``, as ``tests/quality`` checks."""
_AUDIO, _IMAGE = "starter.wav", "starter.png"
_SEED = 6


def write_starters(directory: Path, speak: Speak) -> None:
    """Write them into a checkpoint, with a recording and a drawing."""
    generator = random.Random(_SEED)
    spoken = f"what is {SPOKEN}"
    soundfile.write(directory / _AUDIO, speak(VOICES["Ethan"], spoken, RATE), RATE, subtype="PCM_16")
    images.one_thing(generator).draw(generator).save(directory / _IMAGE)
    starters = [
        {"text": f"What is {SUM}?"},
        {"text": f"What is {DIFFERENCE}?"},
        {"text": "What can you do?"},
        {"audio": _AUDIO, "says": spoken},
        {"text": "What do you see?", "image": _IMAGE},
    ]
    (directory / STARTERS_FILE).write_text(json.dumps(starters, indent=2) + "\n", encoding="utf-8")
