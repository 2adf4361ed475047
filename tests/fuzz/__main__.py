"""``make fuzz``: does any input of a decoder or a protocol show a fault?"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.fuzz.table import FOLDER, TARGETS, Target

ROOT: Final = FOLDER.parents[1]
SECONDS: Final = 600
TIMEOUT_S: Final = 10
"""Of one input."""
RSS_LIMIT_MIB: Final = 2048
GROWTH_MIB: Final = 64
"""More than this between the corpus and the end of a run is a fault."""
_PULSE: Final = re.compile(r"^#(\d+)\s+(INITED|DONE)\s+cov: (\d+) .*? rss: (\d+)Mb", re.M)


def main() -> int:
    """Fuzz the targets one after the other; gives the exit status."""
    options = _options()
    if find_spec("atheris") is None:
        print("atheris is not installed: it has wheels for Linux on x86-64 alone (requirements/dev.lock)")
        return 1
    lines, good = [], True
    for name in options.targets or TARGETS:
        target = TARGETS[name]
        if options.minimise:
            _minimise(target, options.out / name)
            continue
        line, well = _fuzz(target, options.out / name, options.seconds)
        lines.append(line)
        good = good and well
        print(line, flush=True)
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; none is all")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for each target (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "fuzz", help="what is found, and logs")
    parser.add_argument(
        "--minimise", action="store_true", help="keep what was found in tests/fuzz/corpus; nothing is fuzzed"
    )
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}: there are {', '.join(TARGETS)}")
    return options


def _fuzz(target: Target, folder: Path, seconds: int) -> tuple[str, bool]:
    """Fuzz one target.

    Returns:
        A line of a table of results, and whether no fault was found.
    """
    _, seeds = target.load()
    found = _unpack(folder / "corpus", [*target.corpus, *target.faults, *seeds()])
    log = folder / "log"
    arguments = [
        f"-max_total_time={seconds}",
        f"-max_len={target.max_bytes}",
        f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={RSS_LIMIT_MIB}",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
    ]
    status = _run(target, [*arguments, str(found)], log)
    pulses = {kind: numbers for *numbers, kind in _pulses(log)}
    if status or set(pulses) != {"INITED", "DONE"}:
        return f"{target.name}: a fault, or no run at all: {log} says which, its input is beside it", False
    (_, _, before), (runs, edges, after) = pulses["INITED"], pulses["DONE"]
    line = f"| `{target.name}` | {target.what} | {seconds} | {runs:,} | {edges:,} | {after - before:+} MiB |"
    return line, after - before <= GROWTH_MIB


def _pulses(log: Path) -> list[tuple[int, int, int, str]]:
    text = log.read_text(encoding="utf-8", errors="replace")
    return [(int(runs), int(edges), int(rss), kind) for runs, kind, edges, rss in _PULSE.findall(text)]


def _minimise(target: Target, folder: Path) -> None:
    """Keep the fewest and shortest inputs that reach what all of them do."""
    with tempfile.TemporaryDirectory() as kept:
        found = _unpack(folder / "corpus", target.corpus)
        if _run(target, ["-merge=1", kept, str(found)], folder / "merge.log"):
            raise SystemExit(f"{target.name} could not be minimised: {folder / 'merge.log'} says why")
        target.keep(path.read_bytes() for path in Path(kept).iterdir())
    print(f"{target.name}: {len(target.corpus)} inputs, {sum(map(len, target.corpus)):,} bytes", flush=True)


def _unpack(folder: Path, inputs: Iterable[bytes]) -> Path:
    """Add inputs to a folder, as the fuzzer reads and writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in inputs:
        (folder / hashlib.sha1(each, usedforsecurity=False).hexdigest()).write_bytes(each)
    return folder


def _run(target: Target, arguments: list[str], log: Path) -> int:
    command = [sys.executable, "-m", "tests.fuzz.engine", target.name, *arguments]
    with log.open("w", encoding="utf-8") as file:
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, check=False)
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
