"""The rules, the dashboard, what the documentation says of metrics; and Debian's Prometheus."""

import json
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import yaml
from prometheus_client import Metric

from scripts.reference import METRICS, metrics_in
from tests.support.children import ROOT
from tests.support.http import get
from tests.support.processes import wait_until

RULES: Final = ROOT / "deploy/prometheus/rules.yml"
DASHBOARD: Final = ROOT / "deploy/grafana/dashboards/omnirelay.json"
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


def documented(*headings: str) -> dict[str, tuple[str, str]]:
    """Type and help of each metric in the reference, under these headings or all."""
    return {
        name: (kind, said)
        for heading in headings or METRICS
        for place in METRICS[heading]
        for name, kind, said in metrics_in(ROOT / place)
    }


def scraped(metrics: Iterable[Metric]) -> dict[str, tuple[str, str]]:
    """Type and help of each metric of ours that a process tells; each label must be in the help."""
    told = {}
    for metric in metrics:
        if metric.name.startswith("omnirelay_"):
            labels = {label for sample in metric.samples for label in sample.labels}
            missing = [
                label
                for label in labels - {"stage", "edge", "le"}
                if f"`{label}`" not in metric.documentation
            ]
            assert missing == [], metric.name
            name = f"{metric.name.removesuffix('_total')}_total" if metric.type == "counter" else metric.name
            told[name] = (metric.type, metric.documentation)
    return told


def alerts() -> list[dict[str, Any]]:
    """All alert rules."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """All panels of the dashboard that show data."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


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


START_S = 120.0
STOP_S = 20.0
EVERY = "1s"


class Prometheus:
    """A server that reads its targets every second and evaluates the rules as often.

    Args:
        address: ``tcp://HOST:PORT``, where it listens.
        targets: ``HOST:PORT`` of each process.
        directory: For its configuration and its data.
        key: The API key that it shows to them.
    """

    def __init__(self, address: str, targets: list[str], directory: Path, key: str) -> None:
        program = shutil.which("prometheus")
        assert program is not None, (
            "prometheus is missing: run `make test-monitoring`, or install the package"
        )
        self._address = address
        self.config = directory / "prometheus.yml"
        self.config.write_text(
            yaml.safe_dump(
                {
                    "global": {
                        "scrape_interval": EVERY,
                        "scrape_timeout": EVERY,
                        "evaluation_interval": EVERY,
                    },
                    "rule_files": [str(RULES)],
                    "scrape_configs": [
                        {
                            "job_name": "omnirelay",
                            # As the Prometheus Operator adds it.
                            "static_configs": [{"targets": targets, "labels": {"namespace": "omnirelay"}}],
                            "authorization": {"credentials": key},
                        }
                    ],
                }
            ),
            encoding="utf-8",
        )
        self._log = directory / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={self.config}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address={address.removeprefix('tcp://')}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        wait_until(lambda: self._is_ready() or self._process.poll() is not None, "it is ready", START_S)
        assert self._process.poll() is None, self._log.read_text()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        finally:
            self._process.kill()
            self._process.wait(STOP_S)

    def query(self, text: str) -> list[dict[str, Any]]:
        """The answer to a query: a list of ``{"metric": labels, "value": [time, text]}``."""
        answer = self._ask(f"/api/v1/query?{urllib.parse.urlencode({'query': text})}")
        series: list[dict[str, Any]] = answer["result"]
        return series

    def values(self, text: str) -> list[float]:
        """The values of a query that are numbers."""
        values = [float(series["value"][1]) for series in self.query(text)]
        # Not a number is what comes of a division by nothing.
        return [value for value in values if value == value]  # noqa: PLR0124

    def targets(self) -> list[dict[str, Any]]:
        """The processes it reads, with what went wrong at its last visit."""
        active: list[dict[str, Any]] = self._ask("/api/v1/targets")["activeTargets"]
        return active

    def rules(self) -> list[dict[str, Any]]:
        """The rules it evaluates, with what went wrong."""
        return [rule for group in self._ask("/api/v1/rules")["groups"] for rule in group["rules"]]

    def _is_ready(self) -> bool:
        try:
            return get(self._address, "/-/ready").status == 200
        except OSError:
            return False

    def _ask(self, path: str) -> Any:
        answer = get(self._address, path)
        assert answer.status == 200, (path, answer.body)
        return json.loads(answer.body)["data"]
