"""The conversation of a session, within the limits of one request."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from gateway.fairness.quota import Hold
from gateway.http.realtime.items import Item, media_kinds, messages_of
from omnirelay.content import ChatMessage
from omnirelay.errors import DeletedItemError, DuplicateItemError, InvalidRequestError, MediaTooLargeError
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
        if self.has(item.id):
            raise DuplicateItemError(
                f"Error adding item: an item with id {item.id!r} already exists.", "item.id"
            )
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

    def forget_videos(self) -> None:
        """Keep of all videos their sound only."""
        for item in self._items:
            if item.video_tokens:
                item.forget_video()

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

    def has(self, item_id: str) -> bool:
        """Whether there is an item of this id."""
        return any(item.id == item_id for item in self._items)

    def __contains__(self, item: Item) -> bool:
        return item in self._items

    def messages(self) -> list[ChatMessage]:
        """Return the items as messages; those without content are left out."""
        return messages_of(self._items)

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
