"""Metrics as Prometheus' text format or OpenMetrics, whichever the request accepts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

_OPENMETRICS: Final = "application/openmetrics-text"
_VERSIONS: Final = frozenset({None, "1.0.0"})
_TEXTS: Final = frozenset({"text/plain", "text/*", "*/*"})
_QUALITY: Final = re.compile(r"[01](?:\.\d{0,3})?")


def expose(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Write all metrics in the format of the Accept header; returns the text and its content type."""
    if not _wants_openmetrics(accept):
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
    # With another escaping the library takes the colon out of vLLM's names, which OpenMetrics allows.
    return (
        openmetrics.generate_latest(_Distinct(registry), escaping=openmetrics.ALLOWUTF8),
        openmetrics.CONTENT_TYPE_LATEST,
    )


@dataclass(frozen=True)
class _Distinct:
    """Families with distinct names.

    OpenMetrics names a counter's family without ``_total``.  If another family has that name, the counter's
    samples keep their name, in a family of type ``unknown``.
    """

    registry: CollectorRegistry

    def collect(self) -> Iterator[Metric]:
        """All families."""
        families = list(self.registry.collect())
        others = {family.name for family in families if family.type != "counter"}
        for family in families:
            if family.type == "counter" and family.name in others:
                plain = Metric(f"{family.name}_total", family.documentation, "unknown")
                plain.samples = family.samples
                yield plain
            else:
                yield family


def _wants_openmetrics(accept: str) -> bool:
    wished = {True: 0.0, False: 0.0}
    for each in accept.lower().split(","):
        kind, *rest = (part.strip() for part in each.split(";"))
        parameters = dict(part.split("=", 1) for part in rest if "=" in part)
        known = kind == _OPENMETRICS and parameters.get("version") in _VERSIONS
        if known or kind in _TEXTS:
            quality = _QUALITY.fullmatch(parameters.get("q", "1"))
            wished[known] = max(wished[known], float(quality[0]) if quality else 0.0)
    return wished[True] > wished[False]
