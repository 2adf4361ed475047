#!/usr/bin/env python3
"""Make the sample that the README links: two spoken answers, as a file and as a picture of their spectrogram.

    make up                                  # in another terminal
    .venv/bin/python scripts/make_sample.py

``docs/images/answer.mp3`` has one question answered in both voices, half a second apart;
``docs/images/answer.png`` shows it: frequency on the mel scale up to 8 kHz, 60 dB from black to white.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
from PIL import Image
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from omnirelay import Client

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
GATEWAY = "tcp://127.0.0.1:5555"
QUESTION = "what is six plus nine"
VOICES = ("Chelsie", "Ethan")
RATE = 24_000
PAUSE_S = 0.5
FRAME, HOP, BINS, RANGE_DB = 1024, 120, 160, 60.0


def main() -> None:
    """Ask, and write both files."""
    pieces = []
    with Client(GATEWAY) as client:
        for voice in VOICES:
            answer = client.chat(QUESTION, speaker=voice, seed=1).result()
            print(f"{voice}: {answer.text}")
            pieces += [answer.audio, np.zeros(round(PAUSE_S * RATE), np.float32)]
    samples = np.concatenate(pieces[:-1])
    soundfile.write(IMAGES / "answer.mp3", samples, RATE)
    picture(samples).save(IMAGES / "answer.png", optimize=True)


def picture(samples: np.ndarray) -> Image.Image:
    """Draw the mel spectrogram, low frequencies at the bottom, as an image of 256 colours."""
    filters = mel_filter_bank(FRAME // 2 + 1, BINS, 0, 8000, RATE, norm="slaney", mel_scale="slaney")
    mel = spectrogram(
        samples,
        window_function(FRAME),
        FRAME,
        HOP,
        power=2.0,
        mel_filters=filters,
        log_mel="dB",
        db_range=RANGE_DB,
    )
    levels = (mel - mel.max() + RANGE_DB) / RANGE_DB
    image = Image.fromarray((255 * levels[::-1]).astype(np.uint8))
    image.putpalette(_colours())
    return image


def _colours() -> bytes:
    """From black over violet and orange to white."""
    stops = np.array([(0, 0, 0), (80, 20, 110), (190, 55, 85), (250, 150, 40), (255, 255, 235)])
    places = np.linspace(0, len(stops) - 1, 256)
    channels = [np.interp(places, np.arange(len(stops)), stops[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=1).astype(np.uint8).tobytes()


if __name__ == "__main__":
    main()
