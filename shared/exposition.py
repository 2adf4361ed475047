"""Metrics as Prometheus' text format or OpenMetrics, whichever the request accepts."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.requests import Request
from starlette.responses import Response

log = logging.getLogger(__name__)


def metrics_response(request: Request, registry: CollectorRegistry) -> Response:
    """Build the response to a scrape."""
    body, kind = expose(registry, ",".join(request.headers.getlist("accept")))
    return Response(body, headers={"Content-Type": kind, "Vary": "Accept"})


def expose(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Write all metrics in the format of the Accept header; returns the text and its content type."""
    try:
        _, kind = choose_encoder(accept)
    except (TypeError, ValueError) as error:
        # The library compares versions that are no numbers with some that are.
        log.debug("cannot read the versions in an Accept header: %r", error)
        kind = CONTENT_TYPE_PLAIN_0_0_4
    if not kind.startswith("application/openmetrics-text"):
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
