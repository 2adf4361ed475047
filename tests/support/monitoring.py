"""What the rules, the dashboard and the documentation say of metrics."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import yaml

from tests.support.children import ROOT

RULES: Final = ROOT / "deploy/prometheus/rules.yml"
DASHBOARD: Final = ROOT / "deploy/grafana/dashboards/omnirelay.json"
PAGE: Final = ROOT / "docs/metrics.md"
ROW: Final = re.compile(r"^\| `(omnirelay_\w+)` \| (\w+) \| ((?:`\w+`(?:, )?)+) \| .+ \|$", re.MULTILINE)
NAME: Final = re.compile(r"\b(?:omnirelay_|vllm:|process_|python_)\w+")


@dataclass(frozen=True)
class Query:
    """A query of a panel or an alert.

    Attributes:
        owner: The title of the panel, or the name of the alert.
        text: PromQL.
    """

    owner: str
    text: str

    @property
    def names(self) -> set[str]:
        """The metrics that it asks for, without the endings of a histogram's samples."""
        bare = re.sub(r'"[^"]*"', "", self.text)
        return {re.sub(r"_(bucket|count|sum)$", "", name) for name in NAME.findall(bare)}


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels of each metric of the stages in the documentation."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8").partition("\n## Gateway\n")[0])
    assert len(rows) == len({name for name, _, _ in rows})
    return {name: (kind, frozenset(re.findall(r"\w+", labels))) for name, kind, labels in rows}


def alerts() -> list[dict[str, Any]]:
    """All alert rules."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> list[dict[str, Any]]:
    """All panels of the dashboard, and the rows that stand above them."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


def panels() -> list[dict[str, Any]]:
    """All panels of the dashboard that show data."""
    return [panel for panel in dashboard() if panel["type"] != "row"]


def queries() -> Iterator[Query]:
    """What all alerts and panels ask."""
    for rule in alerts():
        yield Query(rule["alert"], rule["expr"])
    yield from panel_queries()


def panel_queries() -> Iterator[Query]:
    """What all panels ask."""
    for panel in panels():
        for target in panel["targets"]:
            yield Query(panel["title"], target["expr"])
