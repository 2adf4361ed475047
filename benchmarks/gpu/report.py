"""The report of all parts that have run, as Markdown."""

from collections.abc import Sequence

from benchmarks.gpu.results import Cell, FinishedPart, Table
from benchmarks.measure.machine import MachineFacts


def report(machine: MachineFacts, device: str, parts: Sequence[FinishedPart], missing: Sequence[str]) -> str:
    """Write the report.

    Args:
        machine: Where it was made.
        device: The device's name.
        parts: Those that ran to their end.
        missing: Why others have not, in words.
    """
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines = [f"# {device}", "", f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB; {versions}"]
    for part in parts:
        verdict = "FAILED" if part.result.problems else "passed"
        lines += ["", f"## {part.name}: {verdict}", ""]
        lines.append(f"checkpoint {part.settings.checkpoint}, {part.settings.device}; {part.wall_s:.0f} s")
        lines += [f"- {problem}" for problem in part.result.problems]
        for table in (*part.result.tables, *part.gpu):
            lines += ["", *_lines(table)]
    if missing:
        lines += ["", "## Not run", "", *(f"- {reason}" for reason in missing)]
    return "\n".join(lines) + "\n"


def _lines(table: Table) -> list[str]:
    rows = [f"| {' | '.join(map(_text, row))} |" for row in table.rows]
    return [table.title, "", f"| {' | '.join(table.columns)} |", "|---" * len(table.columns) + "|", *rows]


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
