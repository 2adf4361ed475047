"""Metrics that several processes have, and their primitives.

State is plain numbers that one thread writes and the scraping thread reads, so a message or a step costs an
addition or two and no lock.  All names begin with ``omnirelay_``.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client import disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from omnirelay.version import version
from shared.log import dropped_lines

Labels = Mapping[str, str]

CODEC_BUCKETS: Final = (3e-6, 1e-5, 3e-5, 1e-4, 1e-3, 1e-2)
"""Seconds of encoding or decoding a message."""
WAIT_BUCKETS: Final = (0.001, 0.01, 0.1, 1.0, 10.0)
"""Seconds that a message waits for ZeroMQ to take it."""

# A creation time per counter would double the scrape; Prometheus detects restarts without it.
disable_created_metrics()


class Distribution:
    """A histogram with one writer and no lock, several times cheaper than prometheus_client's."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Traffic:
    """Messages that passed one end of an edge, their bytes, and the time to encode or decode each."""

    __slots__ = ("bytes", "codec_seconds", "messages")

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.codec_seconds = Distribution(CODEC_BUCKETS)


def counter(name: str, text: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    """A counter (``name`` ends with ``_total``) with one value per combination of labels."""
    return _filled(CounterMetricFamily(name, text), name, values)


def gauge(name: str, text: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    """A gauge; as :func:`counter`."""
    return _filled(GaugeMetricFamily(name, text), name, values)


def _filled(family: Metric, name: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    for labels, value in values:
        family.add_sample(name, dict(labels), value)
    return family


def histogram(name: str, text: str, values: Iterable[tuple[Labels, Distribution]]) -> Metric:
    """A histogram; as :func:`counter`."""
    family = HistogramMetricFamily(name, text)
    for labels, distribution in values:
        total = distribution.total
        counts = list(accumulate(tuple(distribution.counts)))
        for bound, count in zip((*distribution.bounds, float("inf")), counts, strict=True):
            family.add_sample(f"{name}_bucket", {**labels, "le": floatToGoString(bound)}, count)
        family.add_sample(f"{name}_count", dict(labels), counts[-1])
        family.add_sample(f"{name}_sum", dict(labels), total)
    return family


def by_reason(labels: Labels, counts: Mapping[str, int], *expected: str) -> Iterator[tuple[Labels, int]]:
    """The values of a counter by reason.

    Reasons in ``expected`` are reported as 0 before they occur; otherwise their first increase is invisible.
    """
    for reason, count in (dict.fromkeys(expected, 0) | dict(counts)).items():
        yield {**labels, "reason": reason}, count


class ProcessMetrics(Collector):
    """The version of a process, and the log lines that it could not write."""

    def __init__(self, stage: str) -> None:
        self._labels = {"stage": stage}

    def collect(self) -> Iterable[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        yield counter(
            "omnirelay_log_lines_dropped_total",
            "Log lines that could not be written: nobody reads them, or the disk is full.",
            [(self._labels, dropped_lines())],
        )
        yield gauge("omnirelay_build_info", "The `version`.", [({**self._labels, "version": version()}, 1)])
