"""Media of a request: counted, checked for size, and fetched.  Only the thinker looks into the files."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.fairness.quota import Hold
from gateway.input.urls import HttpsUrl, decode_data_url, is_data_url, parse_https
from omnirelay.content import MediaPart
from omnirelay.errors import MediaError, MediaTooLargeError, MediaUnreachableError
from omnirelay.tasks import all_of
from shared.config import MediaConfig
from shared.messages import MAX_MEDIA_ITEMS, MEDIA_KINDS, MediaItem, MediaKind
from shared.messages.payloads import Blob

if TYPE_CHECKING:
    # Loads an HTTP client.
    from gateway.input.fetch import Fetcher

_URL = (str, HttpsUrl)
InThread = Callable[..., Awaitable[Any]]
"""Runs a function on another thread; given the client, the function and its arguments."""


class CheckedItem(NamedTuple):
    """A media item that may be loaded from a file, ``data:`` URL or https URL; its name is for errors."""

    name: str
    kind: MediaKind
    source: memoryview | str | HttpsUrl


@dataclass(frozen=True)
class MediaIntake:
    """Checks and loads the media of requests; without ``fetch`` no https URL is allowed."""

    _config: MediaConfig
    _fetch: "Fetcher | None"
    _in_thread: InThread

    def check(self, items: Sequence[tuple[str, MediaPart]], hold: Hold) -> list[CheckedItem]:
        """Check what needs no loading, and charge the bytes in memory; MediaError or BusyError if refused."""
        counts = Counter(part.kind for _, part in items)
        for kind in MEDIA_KINDS:
            limit: int = getattr(self._config, f"max_{kind}s")
            if counts[kind] > limit:
                raise MediaTooLargeError(
                    f"{counts[kind]} items of kind {kind}, at most {limit} are allowed (media.max_{kind}s)"
                )
        if len(items) > MAX_MEDIA_ITEMS:
            raise MediaTooLargeError(
                f"{len(items)} audio, image and video items, at most {MAX_MEDIA_ITEMS} are allowed together"
            )
        checked = [CheckedItem(name, part.kind, self._source(name, part)) for name, part in items]
        total = sum(part.nbytes for _, part in items)
        self._check_total(total)
        # A URL stays in memory with its frame.
        hold.grow(total + sum(len(part.url) for _, part in items if part.url is not None))
        return checked

    async def load(self, items: Sequence[CheckedItem], hold: Hold) -> list[MediaItem]:
        """Decode and fetch what :meth:`check` returned, charging the bytes; raises the same errors."""
        total = sum(memoryview(each.source).nbytes for each in items if not isinstance(each.source, _URL))

        def grow(size: int) -> None:
            nonlocal total
            total += size
            self._check_total(total)
            hold.grow(size)

        return await all_of(self._load_one(each, grow, hold.client) for each in items)

    def _source(self, name: str, part: MediaPart) -> memoryview | str | HttpsUrl:
        if part.data is not None and part.url is None:
            self._check_size(name, part.nbytes)
            return part.data
        if part.url is None or part.data is not None:
            raise MediaError(f"{name}: give either data or url, and not both")
        if is_data_url(part.url):
            return part.url
        url = parse_https(name, part.url)
        if self._fetch is None:
            raise MediaUnreachableError(
                f"{name}: this gateway fetches from no host (media.url_hosts): send the file itself"
            )
        self._fetch.check(name, url)
        return url

    async def _load_one(self, item: CheckedItem, grow: Callable[[int], None], client: str) -> MediaItem:
        name, kind, source = item
        if not isinstance(source, _URL):
            return MediaItem(kind=kind, data=Blob(source))
        if isinstance(source, str):
            most = self._config.max_item_bytes
            data: bytearray = await self._in_thread(client, decode_data_url, name, source, most)
            grow(len(data))
        elif self._fetch is None:
            raise MediaUnreachableError(f"{name}: this gateway fetches from no host (media.url_hosts)")
        else:
            data = await self._fetch.fetch(name, source, grow, client)
        self._check_size(name, len(data))
        return MediaItem(kind=kind, data=Blob(data))

    def _check_size(self, name: str, size: int) -> None:
        if not size:
            raise MediaError(f"{name}: it is empty")
        limit = self._config.max_item_bytes
        if size > limit:
            raise MediaTooLargeError(
                f"{name}: {size} bytes, at most {limit} are allowed (media.max_item_bytes)"
            )

    def _check_total(self, total: int) -> None:
        limit = self._config.max_request_bytes
        if total > limit:
            raise MediaTooLargeError(
                f"{total} bytes of media together, at most {limit} are allowed (media.max_request_bytes)"
            )
