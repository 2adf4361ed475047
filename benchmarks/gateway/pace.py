"""When a stream's events are due, for a speaker of 50 codec tokens a second."""

import heapq
from collections.abc import Iterator
from typing import Final, Literal

from omnirelay.values import SAMPLE_RATE

Kind = Literal["text", "codec", "audio"]

TEXT_S: Final = 0.25
"""Seconds of speech of a text token: English is spoken at about four tokens a second."""
CODES: Final = 12
"""Codec tokens of a message: those of a block."""
CODES_S: Final = CODES / 50
BLOCKS: Final = (1, 2, 4, 8)
"""Blocks of the first chunks of audio; the rest are as long as the last."""
BLOCK_SAMPLES: Final = round(CODES_S * SAMPLE_RATE)


def chunk_samples(number: int) -> int:
    """Samples of a chunk of audio, by its number from 0."""
    return BLOCK_SAMPLES * BLOCKS[min(number, len(BLOCKS) - 1)]


def events() -> Iterator[tuple[float, Kind]]:
    """Seconds from the stream's begin, and kind, of each event in order; without end.

    A chunk of audio comes when those before it have been heard.
    """
    due: list[tuple[float, Kind]] = [(0.0, "text"), (0.0, "codec"), (0.0, "audio")]
    chunk = 0
    while True:
        at, kind = due[0]
        yield at, kind
        if kind == "audio":
            after = chunk_samples(chunk) / SAMPLE_RATE
            chunk += 1
        else:
            after = TEXT_S if kind == "text" else CODES_S
        heapq.heapreplace(due, (at + after, kind))
