"""A queue that serves clients in turn."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final


@dataclass
class _Turn:
    """One client's waiting requests, each with its arrival number.

    Attributes:
        round: In which the first one is due.
        newcomer: The client had nothing in service when it came: it precedes the others of its round.
    """

    round: int
    newcomer: bool
    waiting: dict[str, int] = field(default_factory=dict)

    def due(self, request_id: str) -> tuple[int, bool, int]:
        """Sort key of a request."""
        return self.round, not self.newcomer, self.waiting[request_id]


class FairQueue:
    """Serves one request of each waiting client per round.

    A client that joins during a round is due in the next one, ahead of clients that still have something in
    service (``is_served``). So no first request waits behind another client's second, and only requests that
    came before its round began overtake a waiting one: nothing starves.
    """

    def __init__(self, is_served: Callable[[str], bool]) -> None:
        self._is_served: Final = is_served
        self._turns: dict[str, _Turn] = {}
        self._arrivals = 0
        self._round = 0

    def __bool__(self) -> bool:
        return bool(self._turns)

    def join(self, request_id: str, client: str) -> None:
        """Append a request."""
        turn = self._turns.get(client)
        if turn is None:
            turn = self._turns[client] = _Turn(self._round + 1, not self._is_served(client))
        self._arrivals += 1
        turn.waiting[request_id] = self._arrivals

    def first(
        self, may: Callable[[str, str], bool] = lambda _client, _request: True
    ) -> tuple[str, str] | None:
        """The client and the request that are due; clients whose requests ``may`` rejects keep their turn."""
        able = (
            (client, next((name for name in turn.waiting if may(client, name)), None))
            for client, turn in self._turns.items()
        )
        ready = [(client, name) for client, name in able if name is not None]
        return min(ready, key=lambda each: self._turns[each[0]].due(each[1]), default=None)

    def serve(self, client: str, request_id: str) -> None:
        """Remove a client's request, which is served now."""
        turn = self._turns[client]
        self._round = max(self._round, turn.round)
        turn.round, turn.newcomer = self._round + 1, False
        self.leave(request_id, client)

    def leave(self, request_id: str, client: str) -> None:
        """Remove a request, if it is queued."""
        turn = self._turns.get(client)
        if turn is None:
            return
        turn.waiting.pop(request_id, None)
        if not turn.waiting:
            del self._turns[client]
