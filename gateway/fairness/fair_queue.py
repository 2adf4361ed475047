"""A line in which clients are served in turn, and not whoever asked most."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final


@dataclass
class _Turn:
    """What one client has waiting, and when it is its turn.

    Attributes:
        round: The round in which its first one is due.
        newcomer: It had nothing being served when it came: it goes before the others of its round.
        waiting: Its requests in order of arrival, each with the number of its arrival.
    """

    round: int
    newcomer: bool
    waiting: dict[str, int] = field(default_factory=dict)

    @property
    def due(self) -> tuple[int, bool, int]:
        """Smaller is sooner."""
        return self.round, not self.newcomer, next(iter(self.waiting.values()))


class FairQueue:
    """Requests of many clients that wait for one thing, served a round at a time.

    In a round each client that waits is served one request.  Who comes while a round is served stands in the
    next one, before those who have been served in it unless something of its own is being served.  So a
    client's first request waits for no second one of anybody who was just served, and what waits is overtaken
    only by requests that came before its round began: nobody starves.

    Args:
        is_served: Says whether something of a client is being served now.
    """

    def __init__(self, is_served: Callable[[str], bool]) -> None:
        self._is_served: Final = is_served
        self._turns: dict[str, _Turn] = {}
        self._arrivals = 0
        self._round = 0

    def __bool__(self) -> bool:
        return bool(self._turns)

    def join(self, request_id: str, client: str) -> None:
        """Stand in line."""
        turn = self._turns.get(client)
        if turn is None:
            turn = self._turns[client] = _Turn(self._round + 1, not self._is_served(client))
        self._arrivals += 1
        turn.waiting[request_id] = self._arrivals

    def first(self, may: Callable[[str], bool] = lambda _: True) -> tuple[str, str] | None:
        """Say whose turn it is.

        Args:
            may: Says of a client whether it may be served now; who may not is passed over and keeps its turn.

        Returns:
            The client and its request; none if nobody waits that may be served.
        """
        ready = [(turn.due, client) for client, turn in self._turns.items() if may(client)]
        if not ready:
            return None
        client = min(ready)[1]
        return client, next(iter(self._turns[client].waiting))

    def serve(self, client: str) -> None:
        """Take a client's first request out of the line: it is served now."""
        turn = self._turns[client]
        self._round = max(self._round, turn.round)
        turn.round, turn.newcomer = self._round + 1, False
        self.leave(next(iter(turn.waiting)), client)

    def leave(self, request_id: str, client: str) -> None:
        """Take a request out of the line, wherever it stands; nothing happens if it does not."""
        turn = self._turns.get(client)
        if turn is None:
            return
        turn.waiting.pop(request_id, None)
        if not turn.waiting:
            del self._turns[client]
