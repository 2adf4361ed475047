"""``python -m benchmarks.quality MODEL``: see ``--help``."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.adapters.omnirelay import OmniRelay
from benchmarks.measure.machine import this_machine
from benchmarks.measure.results import RESULTS, Cell, Table, keep, page, tell
from benchmarks.quality.answers import Asked, Samples, SpokenReply, ask_all, held_out_requests
from benchmarks.quality.figures import Score, answer_figures, speech_figures
from labs.training.data.corpus import SENTENCES, VOICES
from labs.training.data.dialogues import texts_to_read
from labs.training.data.synthesis import synthesize
from labs.training.data.world import spoken_sentences, word_sequences
from labs.training.measure.recognizer import Recognizer
from omnirelay.errors import OmniRelayError
from omnirelay.values import SAMPLE_RATE
from shared.config import DEFAULT_CHECKPOINT

EVERY: Final = 3
"""Of the requests that are spoken, which part is asked again to be spoken in one piece."""


class Listening:
    """The independent listener, and the synthesizer that the voices are learnt from."""

    def __init__(self) -> None:
        seen, _ = spoken_sentences(SENTENCES)
        self.hear = Recognizer(seen).hear
        self.hear_texts = Recognizer([*seen, *word_sequences(1_600), *texts_to_read(3_000)]).hear

    def say(self, speaker: str, text: str) -> Samples:
        """Say a text as a voice of the checkpoint was taught to."""
        return synthesize(VOICES[speaker], text, SAMPLE_RATE)

    def figures(self, streamed: Sequence[SpokenReply], offline: Sequence[SpokenReply]) -> list[Score]:
        """Return all figures of some replies."""
        speech = speech_figures(streamed, offline, list(VOICES), self.hear, self.hear_texts, self.say)
        return [*answer_figures(streamed), *speech]


async def measure(model: Path, requests: Sequence[Asked], clients: int, listening: Listening) -> list[Score]:
    """Ask the stack on a checkpoint, streamed, and a part again in one piece.

    Raises:
        OmniRelayError: The stack could not start, or a request failed.
    """
    async with OmniRelay(model) as server:
        tell(f"{len(requests)} requests, {clients} at once")
        streamed = await ask_all(server.address, requests, clients)
        tell("some of them again, in one piece")
        some = [each for each in requests if each.is_spoken][::EVERY]
        offline = await ask_all(server.address, some, clients, streaming=False)
    tell("listening")
    return listening.figures(streamed, offline)


def table(figures: Sequence[Score]) -> Table:
    """Return a row for each figure."""
    rows: list[list[Cell]] = [
        [each.name, str(each), each.bound, ("kept" if each.kept else "**missed**") if each.bound else ""]
        for each in figures
    ]
    return Table(title="Held-out cases", columns=["", "omnirelay", "bound", ""], rows=rows)


def missed(figures: Sequence[Score], *, few: bool = False) -> list[str]:
    """Return a line for each figure that does not keep its bound; with ``few``, unless chance explains it."""
    return [
        f"{each.name}: {each}, {each.bound}" for each in figures if not (each.plausible if few else each.kept)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return the exit status, 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    add = parser.add_argument
    add("model", type=Path, nargs="?", default=DEFAULT_CHECKPOINT, metavar="DIR", help="the checkpoint")
    add("--count", type=int, default=100, help="questions of each kind (default: 100)")
    add("--clients", type=int, default=4, metavar="N", help="requests at once (default: 4)")
    add("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    options = parser.parse_args(arguments)
    try:
        listening = Listening()
        requests = held_out_requests(options.count)
        found = asyncio.run(measure(options.model, requests, options.clients, listening))
    except OmniRelayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    keep(options.out, "quality", page("Quality", this_machine(), [table(found)]), found)
    for line in missed(found):
        sys.stderr.write(f"MISSED: {line}\n")
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
