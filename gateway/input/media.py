"""A request's sounds, pictures and videos: counted, weighed and brought here for the thinker.

What is in the files is not looked at: that is the thinker's business.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from gateway.fairness.memory_budget import Hold
from gateway.input.urls import HttpsUrl, decode_data_url, is_data_url, parse_https
from omnirelay.content import MediaPart
from omnirelay.errors import MediaError, MediaTooLargeError, MediaUnreachableError
from shared.config import MediaConfig
from shared.messages import MAX_MEDIA_ITEMS, MEDIA_KINDS, MediaItem
from shared.messages.payloads import Blob

Named = tuple[str, MediaPart]
InThread = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments on a thread, where it may take its time."""


class Fetch(Protocol):
    """What fetches files, see :class:`gateway.input.fetch.Fetcher`."""

    def check(self, name: str, url: HttpsUrl) -> None:
        """Refuse a URL whose host is not allowed."""
        ...

    async def fetch(
        self, name: str, url: HttpsUrl, grow: Callable[[int], None], client: str = ""
    ) -> bytearray:
        """Fetch a file."""
        ...


class MediaIntake:
    """Takes the media of requests.

    Args:
        config: What is allowed.
        fetch: Fetches by https; none if no host is allowed.
        in_thread: Where data URLs are decoded; given the client, the function and its arguments.
    """

    def __init__(self, config: MediaConfig, fetch: Fetch | None, in_thread: InThread) -> None:
        self._config = config
        self._fetch = fetch
        self._in_thread = in_thread

    def check(self, items: Sequence[Named], hold: Hold) -> None:
        """Refuse what can be refused at a glance, and count the bytes that are here.

        Args:
            items: All of a request, in order, named.
            hold: What the request holds.

        Raises:
            MediaError: Naming the item; its children say more.
            BusyError: Other requests hold too much.
        """
        counts = Counter(part.kind for _, part in items)
        for kind in MEDIA_KINDS:
            limit: int = getattr(self._config, f"max_{kind}s")
            if counts[kind] > limit:
                raise MediaTooLargeError(
                    f"{counts[kind]} items of kind {kind}, at most {limit} are allowed (media.max_{kind}s)"
                )
        if len(items) > MAX_MEDIA_ITEMS:
            raise MediaTooLargeError(
                f"{len(items)} sounds, pictures and videos, at most {MAX_MEDIA_ITEMS} are allowed together"
            )
        for name, part in items:
            self._check_one(name, part)
        total = sum(part.nbytes for _, part in items)
        self._check_total(total)
        # A URL is in memory too, and stays there with the frame of the others.
        hold.grow(total + sum(len(part.url) for _, part in items if part.url is not None))

    async def load(self, items: Sequence[Named], hold: Hold) -> list[MediaItem]:
        """Bring every item here.

        Args:
            items: As they were checked.
            hold: What the request holds; counts what comes.

        Raises:
            MediaError: Naming the item; its children say more.
            BusyError: Other requests hold too much.
        """
        total = sum(part.nbytes for _, part in items)

        def grow(size: int) -> None:
            nonlocal total
            total += size
            self._check_total(total)
            hold.grow(size)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._load_one(name, part, grow, hold.client)) for name, part in items
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [task.result() for task in tasks]

    def _check_one(self, name: str, part: MediaPart) -> None:
        if (part.data is None) is (part.url is None):
            raise MediaError(f"{name}: give either data or url, and not both")
        if part.data is not None:
            self._check_size(name, part.nbytes)
        elif part.url is not None and not is_data_url(part.url):
            url = parse_https(name, part.url)
            if self._fetch is None:
                raise MediaUnreachableError(
                    f"{name}: this gateway fetches from no host (media.url_hosts): send the file itself"
                )
            self._fetch.check(name, url)

    async def _load_one(
        self, name: str, part: MediaPart, grow: Callable[[int], None], client: str
    ) -> MediaItem:
        data: bytearray | memoryview
        if part.data is not None:
            data = part.data
        elif part.url is not None and is_data_url(part.url):
            most = self._config.max_item_bytes
            data = await self._in_thread(client, decode_data_url, name, part.url, most)
            grow(len(data))
        elif part.url is not None and self._fetch is not None:
            data = await self._fetch.fetch(name, parse_https(name, part.url), grow, client)
        else:
            raise MediaError(f"{name}: give either data or url, and not both")
        self._check_size(name, len(data))
        return MediaItem(kind=part.kind, data=Blob(data))

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
