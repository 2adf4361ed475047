"""A small state of the training, made in a second: sentences hummed instead of spoken."""

import zlib

import numpy as np

from labs.training.data.synthesis import SynthesizerVoice, Wave

TRAINED = [
    "one plus one is two",
    "it is a big red circle",
    "i do not know",
    "hello",
    "you said one two",
    "goodbye",
    # What is answered to silence.
    "i do not hear you",
]
HELD_OUT = ["one plus two is three"]


def hum(voice: SynthesizerVoice, text: str, rate: int) -> Wave:
    """A tone of 80 ms for each letter, higher for one voice than for another."""
    base = 120 + zlib.crc32(voice.name.encode()) % 120
    time = np.arange(int(0.08 * rate)) / rate
    tones = [np.sin(2 * np.pi * (base + 25 * (ord(letter) - 97)) * time) for letter in text]
    return (0.2 * np.concatenate(tones)).astype(np.float32)


def sentences() -> tuple[list[str], list[str]]:
    """What the small corpus says."""
    return TRAINED, HELD_OUT
