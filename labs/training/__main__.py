"""Command line: ``python -m labs.training [PART] --state DIR [--hours H]``.

Without a part, all are made in order.  An interrupted run is resumed.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers

from checkpoint.compact import compress
from labs.training.data import codes, world
from labs.training.data.corpus import SpeechCorpus, make_corpus
from labs.training.data.hearing import Hearing, make_hearing
from labs.training.export import export
from labs.training.measure import evaluation
from labs.training.parts import dit, talker, thinker, vocoder
from labs.training.parts.loop import Stop, Training
from labs.training.parts.origin import origin_of, start_from
from omnirelay.errors import OmniRelayError

_logger = logging.getLogger("labs.training")


def _corpus(state: Path) -> SpeechCorpus:
    return make_corpus(state / "corpus")


def _codes(state: Path) -> npt.NDArray[np.int64]:
    book = make_corpus(state / "codebook", world.spoken_sentences(codes.SENTENCES))
    return codes.make_codes(_corpus(state), state / "codes.safetensors", book)


def _hearing(state: Path) -> Hearing:
    return make_hearing(state / "hearing")


def _export(state: Path, _stop: Stop) -> None:
    export(state, None if origin_of(state) else _corpus(state), state / "checkpoint")
    compress(state / "checkpoint", state / "compact")


PARTS: dict[str, Callable[[Path, Stop], object]] = {
    "corpus": lambda state, _: _corpus(state),
    "codes": lambda state, _: _codes(state),
    "vocoder": lambda state, stop: vocoder.train(_corpus(state), state, stop),
    "dit": lambda state, stop: dit.train(_corpus(state), _codes(state), state, stop),
    "hearing": lambda state, _: _hearing(state),
    "thinker": lambda state, stop: thinker.train(_hearing(state), state, stop),
    "talker": lambda state, stop: talker.train(_corpus(state), _codes(state), _hearing(state), state, stop),
    "evaluation": lambda state, _: evaluation.evaluate(state, _corpus(state), _codes(state)),
    "export": _export,
}

TUNED = ("corpus", "codes", "hearing", "thinker", "talker", "export")
"""What is made of a checkpoint to start from; its DiT and vocoder stay."""


def main(arguments: list[str] | None = None) -> int:
    """Make the requested parts; return the exit status, 3 if the time limit was reached."""
    parser = argparse.ArgumentParser(prog="python -m labs.training", description=__doc__)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "all"], default="all")
    parser.add_argument(
        "--state", type=Path, required=True, metavar="DIR", help="state directory; what it holds is resumed"
    )
    parser.add_argument(
        "--from",
        type=Path,
        dest="origin",
        metavar="DIR",
        help="a compact checkpoint to start from; parts that are not trained are taken from it",
    )
    parser.add_argument("--hours", type=float, default=24.0, help="stop after so long (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default: %(default)s)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("labs").setLevel(logging.INFO)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    options.state.mkdir(parents=True, exist_ok=True)
    stop = Stop(options.hours)
    try:
        if options.origin is not None:
            start_from(options.origin, options.state)
        with stop.on_signals():
            every = TUNED if origin_of(options.state) else tuple(PARTS)
            finished = _run(every if options.part == "all" else (options.part,), options.state, stop)
    except OmniRelayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0 if finished else 3


def _run(parts: Sequence[str], state: Path, stop: Stop) -> bool:
    for part in parts:
        made = PARTS[part](state, stop)
        if isinstance(made, Training) and not made.finished:
            _logger.info("%s: stopped at step %d of %d", part, made.steps, made.recipe.steps)
            return False
        _logger.info("%s: done", part)
    return True


if __name__ == "__main__":
    sys.exit(main())
