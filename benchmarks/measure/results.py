"""What a run gives: figures as JSON, and tables in Markdown."""

import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from benchmarks.measure.load import Load
from benchmarks.measure.machine import MachineFacts

RESULTS: Final = Path("benchmarks/results")
Cell: TypeAlias = str | float | int | None
_STARTED: Final = time.monotonic()


class Measured(msgspec.Struct, frozen=True):
    """One row of a scenario: its name, and all measurements of each figure."""

    name: str
    values: dict[str, list[float]]

    def p50(self, figure: str) -> float:
        """The median of a figure."""
        return percentile(self.values[figure], 0.5)


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Figures for a reader: a row has as many cells as there are columns."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]

    def __str__(self) -> str:
        """The table in Markdown; numbers are rounded and stand on the right."""
        rows = [[_text(cell) for cell in row] for row in self.rows]
        right = [all(row[at][:1].isdigit() for row in rows) for at in range(len(self.columns))]
        lines = [self.columns, ["---:" if each else "---" for each in right], *rows]
        return "\n".join([f"## {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines)])


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run on one checkpoint.

    Attributes:
        checkpoint: Which size of the random checkpoint.
        parameters: Its parameters, in millions.
        machine: Where.
        reference_threads: Least seconds of transformers for an answer of a second, by threads; with the
            fastest number it was measured.
        loads: What was measured under load.
        measured: What other scenarios measured, by scenario.
        compared: Answers that were compared with transformers'.
        unequal: Those of them that differ, in words.
    """

    checkpoint: str
    parameters: float
    machine: MachineFacts
    reference_threads: dict[int, float] = {}
    loads: list[Load] = []
    measured: dict[str, list[Measured]] = {}
    compared: int = 0
    unequal: list[str] = []


def read(path: Path) -> RunResult:
    """Read the JSON of a run."""
    return msgspec.json.decode(path.read_bytes(), type=RunResult)


def as_table(title: str, measured: Sequence[Measured]) -> Table:
    """Show the median and the 95th percentile of each figure."""
    figures = list(dict.fromkeys(figure for each in measured for figure in each.values))
    rows = [
        [
            each.name,
            max(map(len, each.values.values())),
            *(_spread(each.values.get(name, [])) for name in figures),
        ]
        for each in measured
    ]
    return Table(title=f"{title}: P50; P95", columns=["", "n", *figures], rows=rows)


def page(title: str, machine: MachineFacts, parts: Iterable[object]) -> str:
    """A page of tables, with the machine that they are of."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    where = (
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, {machine.system}; {versions}. "
        f"Load average before the run: {machine.load}. "
        f"Real-time priority for what moves bytes, clients included: {'yes' if machine.real_time else 'no'}."
    )
    return "\n\n".join([f"# {title}", where, *map(str, parts)]) + "\n"


def keep(directory: Path, name: str, text: str, figures: Any = None) -> None:
    """Print a page, and write it as NAME.md, its figures as NAME.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.md").write_text(text, encoding="utf-8")
    if figures is not None:
        encoded = msgspec.json.format(msgspec.json.encode(figures), indent=1)
        (directory / f"{name}.json").write_bytes(encoded + b"\n")
    sys.stdout.write(text)
    tell(f"written: {directory / name}.md")


def tell(text: str) -> None:
    """Report progress on standard error."""
    sys.stderr.write(f"[{time.monotonic() - _STARTED:5.0f} s] {text}\n")
    sys.stderr.flush()


def mean(values: Sequence[float]) -> float:
    """The mean; not a number without values."""
    return sum(values) / len(values) if values else math.nan


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed; not a number without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def _spread(values: Sequence[float]) -> Cell:
    if len(values) < 2:
        return values[0] if values else None
    return f"{_text(float(percentile(values, 0.5)))}; {_text(float(percentile(values, 0.95)))}"


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:,.0f}"
    return "" if cell is None else str(cell)
