"""Asks a stage's HTTP endpoint, and reads what it tells Prometheus."""

import http.client
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

TIMEOUT_S = 60.0
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;"
    "version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""The header ``Accept`` of Prometheus 3."""


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics in Prometheus' text format, by the name they are queried by."""
        families = text_string_to_metric_families(self.body.decode())
        return {f"{each.name}_total" if each.type == "counter" else each.name: each for each in families}

    @property
    def openmetrics(self) -> dict[str, Metric]:
        """The metrics in OpenMetrics, which must be valid, by the name of their family."""
        assert self.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        return {each.name: each for each in parse_openmetrics(self.body.decode())}


def get(address: str, path: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
    """Ask an endpoint at ``tcp://HOST:PORT``."""
    connection = http.client.HTTPConnection(address.removeprefix("tcp://"), timeout=TIMEOUT_S)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        response = connection.getresponse()
        told = {name.title(): value for name, value in response.getheaders()}
        return Answer(response.status, told, response.read())
    finally:
        connection.close()


class Readings:
    """The values of metrics, read now.

    Args:
        metrics: A collector's, or what was scraped.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for metric in metrics
            for sample in metric.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The value of one sample; ``le`` is a label too."""
        return self._values[name, frozenset(labels.items())]

    def has(self, name: str, **labels: str) -> bool:
        return (name, frozenset(labels.items())) in self._values


def registry_of(*collectors: Collector) -> CollectorRegistry:
    """A registry of a test's own."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


class Change:
    """How much metrics have moved since this was made.

    Args:
        collect: Gives the metrics.
    """

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect
        self._before = Readings(collect())

    def __call__(self, name: str, **labels: str) -> float:
        """By how much one sample has grown."""
        return Readings(self._collect())(name, **labels) - self._before(name, **labels)
