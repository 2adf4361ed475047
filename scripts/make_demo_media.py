#!/usr/bin/env python3
"""Make the two files that ``omnirelay demo`` sends: a spoken question and a drawing.

    .venv/bin/python scripts/make_demo_media.py

They are written to ``ops/assets``, and are the same bytes each time with the versions of
``requirements/``: the voice is espeak-ng's, the drawing is made of shapes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import av
import espeakng_loader
import numpy as np
from PIL import Image, ImageDraw

ASSETS = Path(__file__).resolve().parent.parent / "ops" / "assets"
QUESTION = "What can you see in this picture?"
WORDS_PER_MINUTE = 115
BIT_RATE = 32_000
SIZE = (336, 252)
SMOOTHING = 4
"""The drawing is made this many times larger and scaled down."""

# Of espeak-ng's speak_lib.h.
_RETRIEVE = 1
_SYNCHRONOUS_RETRIEVE = 2
_RATE = 1
_UTF8 = 1
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def speak(text: str) -> tuple[np.ndarray, int]:
    """Say a text.

    Returns:
        int16 samples ``[n]``, and how many make a second.
    """
    library = ctypes.CDLL(espeakng_loader.get_library_path())
    pieces: list[np.ndarray] = []

    def take(samples: ctypes._Pointer[ctypes.c_short], count: int, _: int) -> int:
        if samples and count:
            pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    rate = library.espeak_Initialize(_SYNCHRONOUS_RETRIEVE, 0, espeakng_loader.get_data_path().encode(), 0)
    if rate <= 0:
        raise SystemExit("espeak-ng cannot be started")
    callback = _CALLBACK(take)
    library.espeak_SetSynthCallback(callback)
    library.espeak_SetVoiceByName(b"en-us")
    library.espeak_SetParameter(_RATE, WORDS_PER_MINUTE, 0)
    words = text.encode()
    library.espeak_Synth(words, len(words) + 1, 0, 0, 0, _UTF8, None, None)
    library.espeak_Synchronize()
    library.espeak_Terminate()
    return np.concatenate(pieces), rate


def write_speech(path: Path, samples: np.ndarray, rate: int) -> None:
    """Write samples as Ogg Opus."""
    with av.open(str(path), "w", format="ogg", options={"fflags": "+bitexact"}) as file:
        stream = file.add_stream("libopus", rate=48_000, layout="mono")
        stream.bit_rate = BIT_RATE
        resampler = av.AudioResampler(format="s16", layout="mono", rate=48_000)
        frame = av.AudioFrame.from_ndarray(samples[np.newaxis], format="s16", layout="mono")
        frame.sample_rate = rate
        for each in [*resampler.resample(frame), *resampler.resample(None)]:
            file.mux(stream.encode(each))
        file.mux(stream.encode(None))


def draw() -> Image.Image:
    """Draw a house under the sun, with a tree beside it."""
    large = Image.new("RGB", (SIZE[0] * SMOOTHING, SIZE[1] * SMOOTHING), (150, 205, 245))
    pen = ImageDraw.Draw(large)

    def at(*numbers: float) -> list[float]:
        return [number * SMOOTHING for number in numbers]

    pen.rectangle(at(0, 178, 336, 252), fill=(104, 170, 84))
    pen.ellipse(at(26, 18, 78, 70), fill=(253, 208, 60))
    for x, y, width in ((190, 30, 60), (214, 20, 50), (238, 34, 58)):
        pen.ellipse(at(x, y, x + width, y + 26), fill=(255, 255, 255))
    pen.rectangle(at(96, 110, 206, 208), fill=(236, 214, 176))
    pen.polygon(at(82, 112, 151, 56, 220, 112), fill=(186, 70, 52))
    pen.rectangle(at(137, 152, 167, 208), fill=(112, 74, 46))
    pen.ellipse(at(159, 178, 164, 183), fill=(240, 200, 90))
    for x in (106, 174):
        pen.rectangle(
            at(x, 128, x + 24, 152), fill=(120, 180, 220), outline=(112, 74, 46), width=2 * SMOOTHING
        )
        pen.line(at(x + 12, 128, x + 12, 152), fill=(112, 74, 46), width=2 * SMOOTHING)
        pen.line(at(x, 140, x + 24, 140), fill=(112, 74, 46), width=2 * SMOOTHING)
    pen.rectangle(at(268, 140, 280, 212), fill=(120, 82, 52))
    for x, y, radius in ((274, 112, 34), (254, 132, 24), (296, 132, 24)):
        pen.ellipse(at(x - radius, y - radius, x + radius, y + radius), fill=(56, 126, 66))
    pen.polygon(at(140, 208, 164, 208, 190, 252, 120, 252), fill=(214, 196, 160))
    return large.resize(SIZE, Image.Resampling.LANCZOS)


def main() -> None:
    """Write both files and say how large they are."""
    ASSETS.mkdir(parents=True, exist_ok=True)
    samples, rate = speak(QUESTION)
    write_speech(ASSETS / "question.ogg", samples, rate)
    draw().save(ASSETS / "picture.png", optimize=True)
    print(f"{len(samples) / rate:.2f} s of speech at {rate} Hz")
    for path in sorted(ASSETS.iterdir()):
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
