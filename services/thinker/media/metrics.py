"""What the thinker tells Prometheus of sounds, pictures and videos."""

from collections.abc import Iterator
from typing import Final, Literal

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric

from shared.messages import MEDIA_KINDS, MediaKind, StageName

ItemOutcome = Literal["decoded", "cached", "failed"]
OUTCOMES: Final[tuple[ItemOutcome, ...]] = ("decoded", "cached", "failed")
SECONDS_BUCKETS: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_STAGE: Final[StageName] = "thinker"


class MediaMetrics:
    """Counts items and times their preparation; for any number of threads."""

    def __init__(self) -> None:
        self._items = Counter(
            "omnirelay_media_items_total",
            "Media items by `kind` and `outcome`.",
            ["stage", "kind", "outcome"],
            registry=None,
        )
        self._decode_seconds = Histogram(
            "omnirelay_media_decode_seconds",
            "Time to decode a file of a `kind`, failures included.",
            ["stage", "kind"],
            registry=None,
            buckets=SECONDS_BUCKETS,
        )
        self._prepare_seconds = Histogram(
            "omnirelay_media_prepare_seconds",
            "Time from a request with media until its prompt was laid out, waits included.",
            ["stage"],
            registry=None,
            buckets=SECONDS_BUCKETS,
        )
        for kind in MEDIA_KINDS:
            self.decoding(kind)
            for outcome in OUTCOMES:
                self.items(kind, outcome)
        self.preparing()

    def items(self, kind: MediaKind, outcome: ItemOutcome) -> Counter:
        """The counter of items that ended so."""
        return self._items.labels(_STAGE, kind, outcome)

    def decoding(self, kind: MediaKind) -> Histogram:
        """The seconds of a decoder."""
        return self._decode_seconds.labels(_STAGE, kind)

    def preparing(self) -> Histogram:
        """The seconds of a whole request."""
        return self._prepare_seconds.labels(_STAGE)

    def collect(self) -> Iterator[Metric]:
        """All of it, ready to be scraped."""
        for metric in (self._items, self._decode_seconds, self._prepare_seconds):
            yield from metric.collect()
