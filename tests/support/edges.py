"""An edge between two processes, with both ends in the test: what was sent is read at once."""

import itertools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import zmq

from shared.transport.queues import PullQueue, PushQueue
from tests.shared.support import sending

M = TypeVar("M")
_numbers = itertools.count()


class Edge(Generic[M]):
    """A real queue over inproc: encoded, sent, decoded and checked as between processes.

    Attributes:
        push: The end that the stage under test is given.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], union: Any) -> None:
        address = f"inproc://edge-{next(_numbers)}"
        self._pull: PullQueue[M] = PullQueue(context, address, union)
        self.push: PushQueue[M] = PushQueue(context, address, sending())

    def take(self) -> list[M]:
        """All messages that were sent since the last call; none may have been refused."""
        messages: list[M] = []
        while True:
            self.push.flush()
            arrived = list(self._pull.drain())
            for credit in self._pull.take_credits():
                self.push.credit(credit)
            if not arrived:
                break
            messages += arrived
        assert self.push.backlog_bytes == 0
        assert not self._pull.refused
        return messages

    def close(self) -> None:
        self.push.close()
        self._pull.close()


MakeEdge = Callable[[Any], Edge[Any]]
