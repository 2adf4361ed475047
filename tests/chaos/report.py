"""Outcomes as tables, in Markdown."""

from collections.abc import Iterable, Sequence

from benchmarks.measure.machine import this_machine
from tests.chaos.cells import MATRIX, STATES, Outcome
from tests.chaos.faults import MEANING


def machine_line() -> str:
    """Where it was run, and with what."""
    here = this_machine()
    versions = ", ".join(f"{name} {number}" for name, number in here.versions.items())
    return f"{here.cpu}, {here.cores} cores, {here.memory_gib} GiB, {here.system}; {versions}."


def table(head: Sequence[str], rows: Iterable[Sequence[object]], text_columns: int = 1) -> str:
    """A table; all columns but the first are numbers."""
    rules = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    lines = [head, rules, *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def matrix(outcomes: Sequence[Outcome]) -> str:
    """One row for what was done to whom; for each state whether all went well, and how long it took."""
    by_row: dict[tuple[str, str], dict[str, Outcome]] = {}
    for each in sorted(outcomes, key=lambda outcome: MATRIX.index(outcome.cell)):
        by_row.setdefault((each.cell.target, MEANING[each.cell.fault]), {})[each.cell.state] = each
    rows = []
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
    head = ["to", "what", *STATES, "resumed", "recovery, s", "newcomer's first audio, s"]
    return table(head, rows, 2 + len(STATES))


def faults(outcomes: Iterable[Outcome]) -> list[str]:
    """What was not as it should be, a line each."""
    return [f"- {each.cell}: {what}" for each in outcomes for what in each.faults]


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


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
