"""What processes count, read twice: the difference is what happened in between, of stages above all."""

import asyncio
import urllib.request
from collections.abc import Mapping
from typing import Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from shared.messages import STAGES

SCRAPE_S: Final = 10.0

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""


class Counters:
    """Samples of Prometheus metrics, by name and labels.

    Args:
        values: The samples.
    """

    def __init__(self, values: Mapping[Key, float] | None = None) -> None:
        self._values = dict(values or {})

    def get(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name that have these labels; 0 if there are none."""
        wanted = set(labels.items())
        return sum(
            value for (sample, has), value in self._values.items() if sample == name and wanted <= set(has)
        )

    def labels(self, name: str, label: str, **labels: str) -> list[str]:
        """The values that a label has among the samples of a name, in the order they came."""
        wanted = set(labels.items())
        return list(
            dict.fromkeys(
                dict(has)[label]
                for sample, has in self._values
                if sample == name and wanted <= set(has) and label in dict(has)
            )
        )

    def since(self, earlier: "Counters") -> "Counters":
        """What has been added since an earlier reading."""
        return Counters({key: value - earlier._values.get(key, 0.0) for key, value in self._values.items()})


async def scrape(addresses: Mapping[str, str]) -> Counters:
    """Read ``/metrics`` of several processes.

    Args:
        addresses: ``tcp://HOST:PORT`` by process; the process becomes the label ``process`` of its samples.
    """
    pages = await asyncio.gather(*(asyncio.to_thread(_page, address) for address in addresses.values()))
    values: dict[Key, float] = {}
    for process, page in zip(addresses, pages, strict=True):
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = {**sample.labels, "process": process}
                values[sample.name, tuple(sorted(labels.items()))] = sample.value
    return Counters(values)


def _page(address: str) -> str:
    url = f"{address.replace('tcp://', 'http://')}/metrics"
    with urllib.request.urlopen(url, timeout=SCRAPE_S) as response:  # noqa: S310 - an address of our own
        text: str = response.read().decode()
    return text


ACTIVITIES: Final = ("wait", "take", "model", "engine", "send")


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage's loop during a load.

    Attributes:
        name: Which stage.
        seconds: What its time went to, by activity, as ``omnirelay_stage_seconds_total`` tells it.
        steps: Steps of its engine.
        mean_batch: Requests in a step.
    """

    name: str
    seconds: dict[str, float]
    steps: int
    mean_batch: float


def stages_of(counted: Counters) -> list[Stage]:
    """The stages that counted something."""
    named = counted.labels("omnirelay_stage_seconds_total", "stage")
    return [_stage(name, counted) for name in STAGES if name in named]


def _stage(name: str, counted: Counters) -> Stage:
    steps = counted.get("omnirelay_stage_batch_requests_count", stage=name)
    return Stage(
        name=name,
        seconds={
            activity: counted.get("omnirelay_stage_seconds_total", stage=name, activity=activity)
            for activity in ACTIVITIES
        },
        steps=round(steps),
        mean_batch=_ratio(counted.get("omnirelay_stage_batch_requests_sum", stage=name), steps),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
