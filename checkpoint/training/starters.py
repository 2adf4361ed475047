"""The questions that the speaking checkpoint brings for people who try it; none was trained."""

import json
import random
from pathlib import Path

import soundfile

from checkpoint.training.data import images, world
from checkpoint.training.data.augmentation import RATE
from checkpoint.training.data.corpus import VOICES
from checkpoint.training.data.synthesis import Speak
from shared.starters import STARTERS_FILE

_AUDIO, _IMAGE = "starter.wav", "starter.png"
_SEED = 5


def write_starters(directory: Path, speak: Speak) -> None:
    """Write them into a checkpoint, with a recording and a drawing."""
    facts = [fact for fact in world.FACTS if fact.is_held_out and world.is_easy(fact) and fact.result > 9]
    generator = random.Random(_SEED)
    typed, heard = generator.sample([fact for fact in facts if fact.operation == "plus"], 2)
    difference = generator.choice([fact for fact in facts if fact.operation == "minus"])
    spoken = f"what is {heard.question}"
    soundfile.write(directory / _AUDIO, speak(VOICES["Ethan"], spoken, RATE), RATE, subtype="PCM_16")
    images.one_thing(generator).draw(generator).save(directory / _IMAGE)
    starters = [
        {"text": f"What is {typed.question}?"},
        {"text": f"What is {difference.question}?"},
        {"text": "What can you do?"},
        {"audio": _AUDIO, "says": spoken},
        {"text": "What do you see?", "image": _IMAGE},
    ]
    (directory / STARTERS_FILE).write_text(json.dumps(starters, indent=2) + "\n", encoding="utf-8")
