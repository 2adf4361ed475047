"""``python -m benchmarks.profile``: where a request's time goes, per stage, as a picture."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.__main__ import RESULTS, SECONDS, RunSettings, measure
from benchmarks.measure.checkpoints import SIZES
from benchmarks.parts.scenarios import Plan
from benchmarks.report.plots import profile
from benchmarks.report.tables import stages
from omnirelay.errors import OmniRelayError


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and draw; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small", help="checkpoint (default: small)")
    parser.add_argument("--seconds", type=float, help="speech of an answer (default: 10; 2.56 on tiny)")
    parser.add_argument("--clients", type=int, nargs="+", metavar="N", default=[1, 8], help="default: 1 8")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help=f"default: in {RESULTS}")
    options = parser.parse_args(arguments)
    plan = Plan(seconds=options.seconds or SECONDS[options.size], levels=options.clients, repeats=1)
    settings = RunSettings(size=options.size, plan=plan, scenarios=["concurrency"], servers=["omnirelay"])
    try:
        result = asyncio.run(measure(settings))
    except OmniRelayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    path: Path = options.out or RESULTS / f"{options.size}-profile.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"{stages(result)}\n\nwritten: {profile(result, path)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
