"""Queues to several receivers; all messages of a request go to the same one."""

import logging
from collections.abc import Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

import zmq

from omnirelay.errors import ConfigError, StageUnavailableError
from shared.log import limited
from shared.messages import Credit, Route, StageName
from shared.metrics import WAIT_BUCKETS, Distribution, Traffic
from shared.transport.queues import PushQueue, Sending


class Routed(Protocol):
    """A message of a request; the first has a ``route`` too."""

    @property
    def request_id(self) -> str:
        """Its request."""

    @property
    def last(self) -> bool:
        """No message of the request follows to the same receiver."""


M = TypeVar("M", bound=Routed)
N = TypeVar("N")
M_contra = TypeVar("M_contra", contravariant=True)
log = logging.getLogger(__name__)


class Outlet(Protocol[M_contra]):
    """Where messages go: one :class:`shared.transport.queues.PushQueue`, or several.

    See :class:`PeerQueues`, and :class:`shared.stage.gateways.GatewayQueues`.
    """

    def put(self, message: M_contra) -> int:
        """Send a message now or later; see :meth:`shared.transport.queues.PushQueue.put`."""

    def stalls(self, request_id: str) -> bool:
        """Whether the receiver of a request's messages does not keep up."""


class QueueGroup(Generic[N]):
    """Several queues that are measured, flushed and credited like a single one."""

    def __init__(self) -> None:
        self.sent: Final = Traffic()
        self.waited: Final = Distribution(WAIT_BUCKETS)
        self._queues: dict[str, PushQueue[N]] = {}
        self._closed_busy_s = 0.0
        self._closed_stalled_s = 0.0

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait here for all receivers."""
        return sum(queue.backlog_bytes for queue in tuple(self._queues.values()))

    @property
    def outstanding_bytes(self) -> int:
        """Bytes that ZeroMQ took and the receivers have not credited."""
        return sum(queue.outstanding_bytes for queue in tuple(self._queues.values()))

    @property
    def stalled_s(self) -> float:
        """Seconds in which something waited, summed over receivers."""
        return self._closed_stalled_s + sum(queue.stalled_s for queue in tuple(self._queues.values()))

    @property
    def refusing(self) -> list[zmq.Socket[bytes]]:
        """See :attr:`shared.transport.queues.PushQueue.refusing`."""
        return [socket for queue in self._queues.values() for socket in queue.refusing]

    @property
    def busy_s(self) -> float:
        """Seconds spent encoding and handing over."""
        return self._closed_busy_s + sum(queue.busy_s for queue in self._queues.values())

    def add(self, name: str, queue: PushQueue[N]) -> None:
        """Take a queue into the group."""
        queue.sent, queue.waited = self.sent, self.waited
        self._queues[name] = queue

    def remove(self, name: str) -> PushQueue[N]:
        """Take a queue, which is to be closed, out of the group."""
        queue = self._queues.pop(name)
        self._closed_busy_s += queue.busy_s
        self._closed_stalled_s += queue.stalled_s
        return queue

    def credit(self, credit: Credit) -> bool:
        """See :meth:`shared.transport.queues.PushQueue.credit`."""
        return any(queue.credit(credit) for queue in self._queues.values())

    def flush(self) -> None:
        """Send the backlogs as far as possible; never blocks."""
        for queue in self._queues.values():
            queue.flush()

    def discard(self, request_id: str) -> None:
        """Drop a request's messages, because it has ended."""
        for queue in self._queues.values():
            queue.discard(request_id)

    def close(self) -> None:
        """Close all queues; ZeroMQ delivers what it holds for a moment."""
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()


class PeerQueues(QueueGroup[M]):
    """One queue per replica of a stage, used like a single one.

    A request's first message has a route, which names its replica; the others follow it.

    Attributes:
        asked: The replicas that it was told to connect to, with their addresses.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], stage: StageName, sending: Sending) -> None:
        super().__init__()
        self._context = context
        self.stage: Final[StageName] = stage
        self._sending = sending
        self.asked: Mapping[str, str] = {}
        self._of_request: dict[str, PushQueue[M]] = {}

    @property
    def names(self) -> list[str]:
        """The connected replicas."""
        return [name for name, queue in self._queues.items() if queue.link.there]

    @property
    def met(self) -> frozenset[str]:
        """The replicas that are connected, or were and will be again: a socket is none until one answers."""
        queues = self._queues.items()
        return frozenset(name for name, queue in queues if queue.link.there or queue.link.breaks)

    @property
    def opened(self) -> dict[str, str]:
        """The replicas to which there is a socket, with their addresses."""
        return {name: queue.address for name, queue in self._queues.items()}

    @property
    def breaks(self) -> dict[str, int]:
        """How often the connection to each replica was lost; without those of 0."""
        return {name: queue.link.breaks for name, queue in self._queues.items() if queue.link.breaks}

    def reach(self, replicas: Mapping[str, str]) -> bool:
        """Connect to exactly these replicas (names and addresses); returns whether they changed.

        The backlog of a replica that is gone is dropped: the gateway restarts its requests elsewhere.
        What could not be opened, for lack of descriptors for example, is tried again by the next call.
        """
        if self.asked == replicas and len(self._queues) == len(replicas):
            return False
        before, self.asked = self.opened, dict(replicas)
        for name in [name for name, queue in self._queues.items() if replicas.get(name) != queue.address]:
            self._close(name)
        for name, address in replicas.items():
            if name not in self._queues:
                self._open(name, address)
        return self.opened != before

    def put(self, message: M) -> int:
        """Send a message to its request's replica.

        Returns:
            Its bytes on the wire; 0 if the replica is gone, whose requests are being aborted.

        Raises:
            StageUnavailableError: The first message of a request names an unknown replica.
            QueueFullError: The backlog is full; the message was not taken.
        """
        if hasattr(message, "route"):
            self._of_request[message.request_id] = self._routed(message.route)
        take = self._of_request.pop if message.last else self._of_request.get
        queue = take(message.request_id, None)
        return queue.put(message) if queue is not None else 0

    def stalls(self, request_id: str) -> bool:
        """Whether a request's replica does not keep up; see :meth:`PushQueue.stalls`."""
        queue = self._of_request.get(request_id)
        return queue is not None and queue.stalls(request_id)

    def discard(self, request_id: str) -> None:
        """Drop a request's messages, because it has ended."""
        self._of_request.pop(request_id, None)
        super().discard(request_id)

    def close(self) -> None:
        """Close all queues; ZeroMQ delivers what it holds for a moment."""
        super().close()
        self._of_request.clear()
        self.asked = {}

    def _routed(self, route: Route | None) -> PushQueue[M]:
        name = route.replica(self.stage) if route is not None else None
        queue = self._queues.get(name) if name is not None else None
        if queue is None:
            raise StageUnavailableError(f"no {self.stage} {name} is known here")
        return queue

    def _open(self, name: str, address: str) -> None:
        try:
            queue: PushQueue[M] = PushQueue(self._context, address, self._sending, self.stage)
        except (ConfigError, zmq.ZMQError) as error:
            # It is not among the names, so it gets no requests.
            limited(log).warning("cannot connect to the %s %s: %s", self.stage, name, error)
            return
        self.add(name, queue)
        log.info("the %s %s is at %s", self.stage, name, address)

    def _close(self, name: str) -> None:
        queue = self.remove(name)
        self._of_request = {key: each for key, each in self._of_request.items() if each is not queue}
        queue.close(deliver=False)
        log.info("the %s %s is gone", self.stage, name)


Outgoing = PushQueue[Any] | QueueGroup[Any]
