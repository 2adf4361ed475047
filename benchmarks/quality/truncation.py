"""``python -m benchmarks.quality.truncation MODEL``: which words of an answer that is cut were heard.

A recognizer listens to the speech up to the cut; what it hears is compared with what the gateway keeps.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.quality.__main__ import Listening
from benchmarks.quality.answers import SpokenReply, ask_all, serving
from benchmarks.quality.requests import held_out_requests
from checkpoint.training.data.corpus import VOICES
from checkpoint.training.measure.recognizer import word_errors
from gateway.http.realtime.speech.heard import SentSpeech
from omnirelay.errors import OmniRelayError
from omnirelay.values import SAMPLE_RATE
from shared.config import DEFAULT_CHECKPOINT

CUTS: Final = tuple(tenth / 10 for tenth in range(1, 10))
"""Shares of the speech after which it is cut."""
SENT: Final = (0.4, 0.6, 0.8)
"""Shares of the speech that had been sent of an answer that was cancelled; its text is complete."""
Keep = Callable[[SpokenReply, float, float], int]


def heard_words(reply: SpokenReply, cut: float, hear: Callable[..., str]) -> int:
    """Return how many words of the text are heard before a cut."""
    words = reply.text.split()
    heard = hear(reply.samples[: int(len(reply.samples) * cut)])
    return min(range(len(words) + 1), key=lambda count: (word_errors(" ".join(words[:count]), heard), count))


def in_proportion(reply: SpokenReply, cut: float, sent: float) -> int:
    """Return how many words are kept in proportion to the speech that was sent."""
    return int(len(reply.text.split()) * min(1.0, cut / sent))


def given_rows(reply: SpokenReply, cut: float, sent: float) -> int:
    """Return how many words the talker had been given when it made the last code that was heard: too many."""
    del sent
    return min(len(reply.text.split()), int(len(reply.samples) * cut / (SAMPLE_RATE / 50)))


def kept(reply: SpokenReply, cut: float, sent: float) -> int:
    """Return how many words the gateway keeps."""
    speech = SentSpeech()
    speech.push((reply.samples[: int(len(reply.samples) * sent)] * 32767).astype("<i2").tobytes())
    speech.complete = sent == 1
    end_ms = min(speech.ms, int(1000 * len(reply.samples) * cut / SAMPLE_RATE))
    return len(speech.cut(reply.text, end_ms).split())


def line(name: str, keep: Keep, replies: Sequence[SpokenReply], heard: np.ndarray) -> str:
    """Return the errors of one way to cut, in words, of complete speech and of cancelled answers."""
    told = [name]
    for shares in ((1.0,), SENT):
        errors = np.array(
            [
                keep(reply, cut, sent) - heard[at, number]
                for sent in shares
                for at, reply in enumerate(replies)
                for number, cut in enumerate(CUTS)
                if cut <= sent
            ]
        )
        told += [f"{np.abs(errors).mean():.2f}", f"{errors.mean():+.2f}", f"{(errors == 0).mean():.0%}"]
    return "| " + " | ".join(told) + " |"


async def replies_of(model: Path, count: int) -> list[SpokenReply]:
    """Ask for the longest answers to typed questions.

    Raises:
        OmniRelayError: The stack could not start, or a request failed.
    """
    typed = [each for each in held_out_requests(60, list(VOICES)) if each.kind.startswith("text")]
    asked = sorted(typed, key=lambda each: -len(each.reply.split()))[:count]
    with tempfile.TemporaryDirectory() as directory:
        async with serving(model, Path(directory)) as address:
            return await ask_all(address, asked, clients=4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.truncation", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=DEFAULT_CHECKPOINT, metavar="DIR")
    parser.add_argument("--count", type=int, default=48, help="answers (default: 48)")
    options = parser.parse_args(arguments)
    try:
        hear = Listening().hear
        replies = asyncio.run(replies_of(options.model, options.count))
    except OmniRelayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    # Of others nobody can say which words were heard.
    understood = [each for each in replies if each.text and each.text == hear(each.samples)]
    heard = np.array([[heard_words(each, cut, hear) for cut in CUTS] for each in understood])
    lines = [
        f"{len(understood)} of {len(replies)} answers are understood, cut {len(CUTS)} times each",
        "| words kept | complete: error | bias | exact | cancelled: error | bias | exact |",
        "|---|---|---|---|---|---|---|",
        line("in proportion", in_proportion, understood, heard),
        line("given to the talker", given_rows, understood, heard),
        line("the gateway's", kept, understood, heard),
    ]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
