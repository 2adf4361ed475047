"""``make chaos``: processes of a running stack die, freeze and fail; is any answer another than it was?"""

import argparse
import random
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure.machine import this_machine
from benchmarks.measure.results import keep, page
from checkpoint import write_checkpoint
from shared.messages import STAGES
from tests.chaos.cells import MATRIX, STATES, Campaign, Cell, Outcome
from tests.chaos.faults import ALL_FAULTS
from tests.chaos.report import faults, matrix
from tests.chaos.soak import soak
from tests.support.restarting import RestartingStack


def main() -> int:
    """Run what the command line asks for; gives the exit status."""
    options = _options()
    print(f"seed {options.seed}", flush=True)
    # A harness that is told to end takes its processes along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as scratch:
        folder = options.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = Path(scratch) / "checkpoint"
        write_checkpoint(model)
        chance = random.Random(options.seed)
        if options.soak is not None:
            parts, wrong = soak(model, folder, chance, options.soak * 60, options.replicas, options.targets)
        else:
            parts, wrong = _matrix(model, folder, chance, options)
    text = page(f"Chaos, seed {options.seed}", this_machine(), [*parts, "\n".join(wrong)])
    keep(options.out.parent, options.out.stem, text)
    return int(bool(wrong))


def _matrix(
    model: Path, folder: Path, chance: random.Random, options: argparse.Namespace
) -> tuple[list[object], list[str]]:
    cells = [
        cell
        for cell in MATRIX
        # Two have twice the places, so nothing is queued.
        if not (options.gateways > 1 and cell.state == "queued")
        and cell.target in options.targets
        and cell.fault in options.faults
        and cell.state in options.states
    ]
    if options.only:
        cells = [cell for cell in cells if ",".join(cell) in options.only]
    chance.shuffle(cells)
    outcomes = []
    with RestartingStack(model, folder, options.replicas, gateways=options.gateways) as stack:
        campaign = Campaign(stack, chance)
        for cell in cells[: options.cells]:
            outcome = campaign.run(cell)
            outcomes.append(outcome)
            print(_line(len(outcomes), outcome), flush=True)
    return [matrix(outcomes)], faults(outcomes)


def _line(number: int, outcome: Outcome) -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} s"

    cell: Cell = outcome.cell
    verdict = "; ".join(outcome.faults) or "ok"
    return (
        f"{number:3} {cell.target:9} {cell.fault:7} {cell.state:12} tries {outcome.tries} "
        f"resumed {outcome.resumed:2} recovery {seconds(outcome.recovery_s):7} "
        f"newcomer {seconds(outcome.ttfa_s):7} in all {seconds(outcome.seconds):7} {verdict}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    targets = (*STAGES, "gateway")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of all that is drawn")
    parser.add_argument("--cells", type=int, help="draw so many cells of the matrix; all without it")
    parser.add_argument("--targets", choices=targets, default=targets, **several)
    parser.add_argument("--faults", choices=ALL_FAULTS, default=ALL_FAULTS, **several)
    parser.add_argument("--states", choices=STATES, default=STATES, **several)
    parser.add_argument("--only", nargs="+", metavar="TARGET,FAULT,STATE", help="these cells of the matrix")
    parser.add_argument("--replicas", type=int, choices=(1, 2), default=1, help="of each stage")
    parser.add_argument("--gateways", type=int, choices=(1, 2), default=1, help="that share the stages")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="mixed load instead of the matrix")
    parser.add_argument("--out", type=Path, default=Path("out/chaos.md"), help="where the tables go, NAME.md")
    parser.add_argument("--logs", type=Path, help="a folder that keeps the processes' logs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
