"""Outcomes as tables."""

from collections.abc import Iterable, Sequence
from typing import Final

from benchmarks.measure.results import Cell, Table, percentile
from tests.chaos.cells import MATRIX, STATES, Outcome
from tests.chaos.faults import MEANING

FIGURES: Final = ("n", "P50", "P95", "most")


def matrix(outcomes: Sequence[Outcome]) -> Table:
    """One row for what was done to whom; for each state whether all went well, and how long it took."""
    by_row: dict[tuple[str, str], dict[str, Outcome]] = {}
    for each in sorted(outcomes, key=lambda outcome: MATRIX.index(outcome.cell)):
        by_row.setdefault((each.cell.target, MEANING[each.cell.fault]), {})[each.cell.state] = each
    rows: list[list[Cell]] = []
    for (target, fault), cells in by_row.items():
        done = cells.values()
        rows.append([
            target,
            fault,
            *(_verdict(cells.get(state)) for state in STATES),
            sum(each.resumed for each in done),
            _span([each.recovery_s for each in done]),
            _span([each.ttfa_s for each in done]),
        ])  # fmt: skip
    columns = ["to", "what", *STATES, "resumed", "recovery, s", "newcomer's first audio, s"]
    return Table(title="Faults", columns=columns, rows=rows)


def faults(outcomes: Iterable[Outcome]) -> list[str]:
    """What was not as it should be, a line each."""
    return [f"- {each.cell}: {what}" for each in outcomes for what in each.faults]


def figures(seconds: Sequence[float]) -> list[Cell]:
    """The cells of :data:`FIGURES`."""
    shown = (percentile(seconds, 0.5), percentile(seconds, 0.95), max(seconds))
    return [len(seconds), *(f"{1000 * each:.0f} ms" for each in shown)]


def _verdict(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    return "**fault**" if outcome.faults else "ok"


def _span(values: Iterable[float | None]) -> str:
    """The least and the greatest."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{min(known):.1f} to {max(known):.1f}"
