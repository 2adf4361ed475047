"""Figures as a table for people and as JSON."""

from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.quality.figures import Score

Columns = Mapping[str, Sequence[Score]]
"""The figures of each server, the measured one first."""


def table(columns: Columns) -> str:
    """Return a table in Markdown; a row for each figure of the first server."""
    servers = list(columns)
    beside = [{figure.name: figure for figure in columns[name]} for name in servers[1:]]
    lines = [
        f"| held-out cases | {' | '.join(servers)} | bound | |",
        f"|---|{'--:|' * len(servers)}--:|---|",
    ]
    for figure in columns[servers[0]]:
        others = [_shown(found.get(figure.name)) for found in beside]
        cells = [figure.name, _shown(figure), *others, _bound(figure), _verdict(figure)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def missed(figures: Sequence[Score], *, few: bool = False) -> list[str]:
    """Return a line for each figure that does not keep its bound.

    Args:
        figures: All of them.
        few: There are few cases: a miss that chance explains is none.
    """
    return [
        f"{each.name}: {_shown(each)}, {_bound(each)}"
        for each in figures
        if not (each.plausible if few else each.kept)
    ]


def as_json(columns: Columns) -> bytes:
    """Return the figures of every server."""
    found = {
        server: [
            {**_fields(figure), "share": round(figure.value, 4), "kept": figure.kept} for figure in figures
        ]
        for server, figures in columns.items()
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def _fields(figure: Score) -> dict[str, object]:
    return dict(msgspec.to_builtins(figure))


def _shown(figure: Score | None) -> str:
    if figure is None:
        return "-"
    return f"{figure.value:.1%} ({figure.count} of {figure.of})"


def _bound(figure: Score) -> str:
    if figure.least is not None:
        return f"at least {figure.least:.0%}"
    return "" if figure.most is None else f"at most {figure.most:.1%}"


def _verdict(figure: Score) -> str:
    if figure.least is None and figure.most is None:
        return ""
    return "kept" if figure.kept else "**missed**"
