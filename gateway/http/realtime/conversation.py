"""The conversation of a session, within the limits of one request, and its prompt, computed early."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.access.account import ClientAccount
from gateway.fairness.quota import Hold
from gateway.http.fields import named
from gateway.http.realtime.audio import BYTES_PER_S, Format
from gateway.http.realtime.items import Item, media_kinds, messages_of, read_item
from gateway.manager import Gateway
from omnirelay.content import ChatMessage
from omnirelay.errors import DeletedItemError, DuplicateItemError, InvalidRequestError, MediaTooLargeError
from omnirelay.protocol import GenerateRequest
from shared.config import MediaConfig

MAX_ITEMS: Final = 512


@dataclass(eq=False)
class RealtimeConversation:
    """The items in order; the oldest are deleted when they exceed the limits of a request."""

    _media: MediaConfig
    _held: Hold
    _items: list[Item] = field(default_factory=list)

    def add(self, item: Item, after: str | None = None, hold: Hold | None = None) -> str | None:
        """Insert an item at the end, after another one, or first (``root``); ``hold`` is its reserved memory.

        Returns:
            The id of the item before it.

        Raises:
            DuplicateItemError: The id exists.
            InvalidRequestError: The item before it does not exist.
            MediaTooLargeError: The item alone exceeds the limits of a request.
            BusyError: Memory is short.
        """
        if any(each.id == item.id for each in self._items):
            raise DuplicateItemError(
                f"Error adding item: an item with id {item.id!r} already exists.", "item.id"
            )
        with named({"item_id": "previous_item_id"}):
            at = len(self._items) if after is None else 0 if after == "root" else self._index(after) + 1
        if problem := self._excess(1, item.weight, Counter(media_kinds(item))):
            raise MediaTooLargeError(problem)
        item.keep(self._held, hold)
        self._items.insert(at, item)
        return self._items[at - 1].id if at else None

    def make_room(self) -> list[Item]:
        """Delete the oldest items until the others are within the limits, and return those deleted.

        Before, all but the newest videos within the limits are forgotten; their sound is kept.
        """
        videos = tokens = 0
        for item in reversed(self._items):
            if item.video_tokens:
                videos, tokens = videos + 1, tokens + item.video_tokens
                if videos > self._media.max_videos or tokens > self._media.realtime_video_tokens:
                    item.forget_video()
        sizes = [(item.weight, media_kinds(item)) for item in self._items]
        weight = sum(each for each, _ in sizes)
        kinds = Counter(kind for _, each in sizes for kind in each)
        deleted: list[Item] = []
        while len(self._items) > 1 and self._excess(len(self._items), weight, kinds):
            oldest_weight, oldest_kinds = sizes[len(deleted)]
            weight -= oldest_weight
            kinds.subtract(oldest_kinds)
            deleted.append(self._items.pop(0))
            deleted[-1].release()
        return deleted

    def shorten(self) -> list[Item] | None:
        """Delete the oldest quarter of the items, or forget the video of the only one.

        Returns:
            Those deleted; None if nothing can go.
        """
        asked = self.asked()
        if len(asked) > 1:
            end = self._items.index(asked[max(1, len(asked) // 4)])
            deleted, self._items = self._items[:end], self._items[end:]
            for item in deleted:
                item.release()
            return deleted
        if not (asked and asked[0].video_tokens):
            return None
        asked[0].forget_video()
        return []

    def asked(self) -> list[Item]:
        """Return the items that are in a prompt."""
        return [item for item in self._items if item.parts]

    def remove(self, item_id: str) -> None:
        """Delete an item.

        Raises:
            DeletedItemError: The id is unknown.
        """
        self._items.pop(self._index(item_id, DeletedItemError)).release()

    def get(self, item_id: str, unknown: type[InvalidRequestError] = InvalidRequestError) -> Item:
        """Return an item.

        Raises:
            InvalidRequestError: The id is unknown; of the type ``unknown``.
        """
        return self._items[self._index(item_id, unknown)]

    def __contains__(self, item: Item) -> bool:
        return item in self._items

    def messages(self) -> list[ChatMessage]:
        """Return the items as messages; those without content are left out."""
        return messages_of(self._items)

    async def read(self, items: list[dict[str, Any]], audio_format: Format) -> list[ChatMessage]:
        """Return a response's own input as messages: items of a client, or references to those here.

        Raises:
            InvalidRequestError: One is invalid, or its reference unknown.
        """
        read = []
        for at, values in enumerate(items):
            if values.get("type") == "item_reference":
                read.append(self.get(str(values.get("id"))))
            else:
                read.append(await asyncio.to_thread(read_item, values, f"response.input[{at}]", audio_format))
        return messages_of(read)

    def clear(self) -> None:
        """Delete all items."""
        for item in self._items:
            item.release()
        self._items.clear()

    def _index(self, item_id: str, unknown: type[InvalidRequestError] = InvalidRequestError) -> int:
        for at, item in enumerate(self._items):
            if item.id == item_id:
                return at
        raise unknown(f"there is no item {item_id[:64]!r}", "item_id")

    def _excess(self, number: int, weight: int, kinds: Counter[str]) -> str | None:
        """Say which limit of a request so many items exceed; none if none."""
        for kind, count in kinds.items():
            limit: int = getattr(self._media, f"max_{kind}s")
            if count > limit:
                return f"{count} items of kind {kind}, the limit is {limit} (media.max_{kind}s)"
        most = self._media.max_request_bytes
        if weight > most:
            return f"{weight} bytes, the limit is {most} (media.max_request_bytes)"
        return f"{number} items, the limit is {MAX_ITEMS}" if number > MAX_ITEMS else None


AHEAD_BYTES: Final = BYTES_PER_S * 15 // 100
"""What the thinker needs of the audio behind a window."""
LOOK_BYTES: Final = BYTES_PER_S
"""Audio between two transcripts of a recording that goes on."""
PARTS: Final = 16
"""A recording is sent again when it has grown by a part of it, so that all together are few times as long."""
PAUSE_S: Final = 0.1
"""A request that follows within this time needs nothing computed before it."""
Look = Callable[[GenerateRequest, str], Coroutine[Any, Any, None]]
"""Processes a request that may come, on a thinker."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class EarlyPrompt:
    """At most one beginning at a time.

    Attributes:
        thinker: The one that computed the last beginning.
        _client: Whose allowance of tokens is used.
        _failed: A beginning has failed: it might end an engine, so no other follows in this session.
    """

    _gateway: Gateway
    _account: ClientAccount
    _client: str
    thinker: str | None = None
    _work: asyncio.Task[None] | None = None
    _sent_bytes: int = 0
    _failed: bool = False

    def heard(
        self, size: int, prompt: Callable[[], Awaitable[GenerateRequest]], look: Look | None = None
    ) -> None:
        """Audio was appended: have what is sure of the prompt computed, once another window is complete.

        A look does not wait for a window: encoding an incomplete one again is cheap, and words come sooner.

        Args:
            size: Bytes in the input audio buffer.
            prompt: Makes the request as it would be now.
            look: Processes it there instead, until :meth:`stop`.
        """
        step = LOOK_BYTES if look else round(self._gateway.prompts.family.audio_window_s * BYTES_PER_S)
        steps = (size - AHEAD_BYTES) // step
        sent = self._sent_bytes // step
        busy = self._work is not None and not self._work.done()
        if steps < sent + 1 + sent // PARTS or busy:
            return
        self._sent_bytes = steps * step
        thinker = self._room()
        if thinker is not None:
            self._work = asyncio.create_task(self._compute_so_far(prompt, thinker, look))

    def added(self, prompt: Callable[[], GenerateRequest]) -> None:
        """An item was added: have the whole prompt computed, unless a request follows at once."""
        self.stop()
        self._work = asyncio.create_task(self._compute_after_pause(prompt))

    def renew(self) -> None:
        """A request was taken: as much may be computed early as before."""
        self._gateway.prefills.renew(self._client)

    def stop(self) -> None:
        """Compute nothing more of the recording so far."""
        self._sent_bytes = 0
        if self._work is not None:
            self._work.cancel()
            self._work = None

    def _room(self) -> str | None:
        return None if self._failed else self._gateway.prefills.thinker_for(self._client, self.thinker)

    async def _compute_so_far(
        self, prompt: Callable[[], Awaitable[GenerateRequest]], thinker: str, look: Look | None
    ) -> None:
        request = await prompt()
        await (look(request, thinker) if look else self._compute(request, thinker, goes_on=True))

    async def _compute_after_pause(self, prompt: Callable[[], GenerateRequest]) -> None:
        await asyncio.sleep(PAUSE_S)
        thinker = self._room()
        if thinker is not None:
            await self._compute(prompt(), thinker, goes_on=False)

    async def _compute(self, request: GenerateRequest, thinker: str, goes_on: bool) -> None:
        gateway = self._gateway
        outcome = await gateway.compute_early(request, self._account, self._client, thinker, goes_on)
        if outcome == "computed":
            self.thinker = thinker
        elif outcome == "failed":
            log.info("nothing more is computed early for %s", self._account.name)
            self._failed = True
