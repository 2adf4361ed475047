"""``python -m benchmarks.quality MODEL``: see ``--help``."""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.measure.output import tell
from benchmarks.quality.answers import Samples, SpokenReply, ask_all, serving
from benchmarks.quality.figures import Score, answer_figures, speech_figures
from benchmarks.quality.reference import Oracle
from benchmarks.quality.report import as_json, missed, table
from benchmarks.quality.requests import Asked, held_out_requests
from checkpoint.training.data.corpus import SENTENCES, VOICES
from checkpoint.training.data.synthesis import synthesize
from checkpoint.training.data.world import spoken_sentences
from checkpoint.training.measure.recognizer import Recognizer
from omnirelay.errors import OmniRelayError
from omnirelay.values import SAMPLE_RATE
from shared.config import DEFAULT_CHECKPOINT

RESULTS: Final = Path("benchmarks/results")
EVERY: Final = 3
"""Of the requests, which part is asked again to be spoken in one piece."""


class Listening:
    """The independent listener, and the synthesizer that the voices are learnt from."""

    def __init__(self) -> None:
        seen, _ = spoken_sentences(SENTENCES)
        self.hear = Recognizer(seen).hear

    def say(self, speaker: str, text: str) -> Samples:
        """Say a text as a voice of the checkpoint was taught to."""
        return synthesize(VOICES[speaker], text, SAMPLE_RATE)


def figures(
    streamed: Sequence[SpokenReply], offline: Sequence[SpokenReply], listening: Listening
) -> list[Score]:
    """Return all figures of some replies."""
    voices = list(VOICES)
    return [
        *answer_figures(streamed),
        *speech_figures(streamed, offline, voices, listening.hear, listening.say),
    ]


async def measure(model: Path, requests: Sequence[Asked], clients: int, listening: Listening) -> list[Score]:
    """Ask the stack on a checkpoint, streamed, and a part again in one piece.

    Raises:
        OmniRelayError: The stack could not start, or a request failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        async with serving(model, Path(directory)) as address:
            tell(f"{len(requests)} requests, {clients} at once")
            streamed = await ask_all(address, requests, clients)
            tell("some of them again, in one piece")
            offline = await ask_all(address, requests[::EVERY], clients, streaming=False)
    tell("listening")
    return figures(streamed, offline, listening)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return the exit status, 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument(
        "model", type=Path, nargs="?", default=DEFAULT_CHECKPOINT, metavar="DIR", help="a speaking checkpoint"
    )
    parser.add_argument("--count", type=int, default=100, help="questions of each kind (default: 100)")
    parser.add_argument("--clients", type=int, default=4, metavar="N", help="requests at once (default: 4)")
    parser.add_argument(
        "--reference", action="store_true", help="transformers' generate beside: takes ten times as long"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    options = parser.parse_args(arguments)
    try:
        listening = Listening()
        requests = held_out_requests(options.count, list(VOICES))
        found = asyncio.run(measure(options.model, requests, options.clients, listening))
        columns = {"omnirelay": found}
        if options.reference:
            tell("transformers")
            columns["transformers"] = figures(Oracle(options.model).answers(requests), [], listening)
    except OmniRelayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "quality.json").write_bytes(as_json(columns))
    (options.out / "quality.md").write_text(table(columns), encoding="utf-8")
    sys.stdout.write(table(columns))
    tell(f"written: {options.out / 'quality'}.json and .md")
    for line in missed(found):
        sys.stderr.write(f"MISSED: {line}\n")
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
