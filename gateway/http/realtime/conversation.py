"""A conversation that a session keeps, within what one request may hold."""

from collections import Counter
from typing import Final

from gateway.fairness.memory_budget import ClientBudget, Hold
from gateway.http.realtime.items import Item, media_kinds
from omnirelay.content import ChatMessage
from omnirelay.errors import InvalidRequestError, MediaTooLargeError
from shared.config import MediaConfig

MAX_ITEMS: Final = 512


class Conversation:
    """The items, in order.  Where one more is too much for a request, the oldest are forgotten.

    Args:
        media: What a request may bring.
        held: Where bytes are counted.
    """

    def __init__(self, media: MediaConfig, held: ClientBudget) -> None:
        self._media = media
        self._held = held
        self._items: list[Item] = []

    @property
    def last_id(self) -> str | None:
        """The name of the last item."""
        return self._items[-1].id if self._items else None

    def add(self, item: Item, after: str | None = None, hold: Hold | None = None) -> str | None:
        """Add an item.

        Args:
            item: The item.
            after: The item before it, ``root`` for none; none is the last one.
            hold: What is counted for its bytes already.

        Returns:
            The name of the item before it.

        Raises:
            InvalidRequestError: The name is taken, or the item before it is not known.
            MediaTooLargeError: The item alone is more than a request may have.
            BusyError: There is no room for its bytes.
        """
        if any(each.id == item.id for each in self._items):
            raise InvalidRequestError(f"there is an item {item.id!r} already", "item.id")
        at = len(self._items) if after is None else 0 if after == "root" else self._index(after) + 1
        if problem := self._excess([item]):
            raise MediaTooLargeError(problem)
        item.keep(self._held, hold)
        self._items.insert(at, item)
        return self._items[at - 1].id if at else None

    def make_room(self) -> list[Item]:
        """Forget the oldest items until one request can hold the others.

        Returns:
            The items that were forgotten.
        """
        forgotten = []
        while len(self._items) > 1 and self._excess(self._items):
            forgotten.append(self._items.pop(0))
            forgotten[-1].forget()
        return forgotten

    def remove(self, item_id: str) -> None:
        """Forget an item.

        Raises:
            InvalidRequestError: There is none of that name.
        """
        self._items.pop(self._index(item_id)).forget()

    def get(self, item_id: str) -> Item:
        """Give an item.

        Raises:
            InvalidRequestError: There is none of that name.
        """
        return self._items[self._index(item_id)]

    def messages(self) -> list[ChatMessage]:
        """Give what the model reads."""
        return [item.message() for item in self._items if item.parts]

    def clear(self) -> None:
        """Forget everything."""
        for item in self._items:
            item.forget()
        self._items.clear()

    def _index(self, item_id: str) -> int:
        for at, item in enumerate(self._items):
            if item.id == item_id:
                return at
        raise InvalidRequestError(f"there is no item {item_id[:64]!r}", "item_id")

    def _excess(self, items: list[Item]) -> str | None:
        """Say what is too much for a request; none if nothing is."""
        counts = Counter(kind for item in items for kind in media_kinds(item))
        for kind, count in counts.items():
            limit: int = getattr(self._media, f"max_{kind}s")
            if count > limit:
                return f"{count} items of kind {kind}, at most {limit} are allowed (media.max_{kind}s)"
        weight = sum(item.weight for item in items)
        most = self._media.max_request_bytes
        if weight > most:
            return f"{weight} bytes, at most {most} are kept (media.max_request_bytes)"
        return f"{len(items)} items, at most {MAX_ITEMS} are kept" if len(items) > MAX_ITEMS else None
