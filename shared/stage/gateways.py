"""The gateways that share a stage, as one of its replicas sees them."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import zmq

from omnirelay.errors import ConfigError
from shared.config import Config, GatewayAddresses
from shared.messages import (
    MISSED_HEARTBEATS,
    Farewell,
    Heartbeat,
    Peers,
    StageEvent,
    StageName,
    control_identity,
)
from shared.stage.heartbeat import HeartbeatThread
from shared.transport.control import ControlClient
from shared.transport.queues import PushQueue, Sending
from shared.transport.routing import QueueGroup

log = logging.getLogger(__name__)


class GatewayLink:
    """One gateway: the sockets towards it, and whether its requests are taken.

    Attributes:
        control: Aborts in, confirmations out.
        heart: Sends it heartbeats.
        events: What comes out goes there.
        name: Whose requests are taken; None while none answers at its address.
        replicas: The replicas of the next stage that it has named, with their addresses.
        released: It needs this replica, which drains, no more.
        alone: Its request that it knows to be computed alone.
    """

    def __init__(
        self,
        control: ControlClient,
        heart: HeartbeatThread,
        events: PushQueue[StageEvent],
        orphan_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.control: Final = control
        self.heart: Final = heart
        self.events: Final = events
        self.name: str | None = None
        self.replicas: Mapping[str, str] = {}
        self.released = False
        self.alone: str | None = None
        self._orphan_timeout_s = orphan_timeout_s
        self._clock = clock
        self._heard = 0.0

    def hear(self, message: Peers) -> bool:
        """Take its message; True if it is a new gateway, so that its predecessor's requests are orphans."""
        self._heard = self._clock()
        self.heart.answered(message)
        self.released, self.alone = message.released, message.alone
        if message.replicas is not None:
            self.replicas = message.replicas
        if message.gateway == self.name:
            return False
        log.info("joined the gateway %s", message.gateway)
        self.name = message.gateway
        return True

    def leave(self) -> None:
        """It is gone."""
        log.info("left the gateway %s", self.name)
        self.name, self.replicas, self.released, self.alone = None, {}, False, None

    @property
    def abandoned(self) -> bool:
        """Whether it has been silent for too long."""
        silent_s = max(self._orphan_timeout_s, MISSED_HEARTBEATS * self.heart.interval_s)
        return self.name is not None and self._clock() - self._heard > silent_s

    def owns(self, request_id: str) -> bool:
        """Whether a request is one of its: their ids begin with its name."""
        return self.name is not None and request_id.startswith(self.name)

    def own(self, request_id: str | None) -> str | None:
        """A request, if it is one of its."""
        return request_id if request_id is not None and self.owns(request_id) else None

    def report(self, heartbeat: Heartbeat, at_once: bool) -> None:
        """Pass the loop's report to the heartbeat thread, as this gateway needs it."""
        breaks = {"gateway": self.events.link.breaks} if self.events.link.breaks else {}
        told = msgspec.structs.replace(
            heartbeat,
            gateway=self.name,
            breaks={**heartbeat.breaks, **breaks},
            alone=self.own(heartbeat.alone),
        )
        self.heart.note(told, at_once)

    def close(self, deliver: bool = True) -> None:
        """Close its sockets; ``deliver`` lets ZeroMQ send what it holds."""
        self.heart.stop()
        self.events.close(deliver)
        self.control.close()


class GatewayQueues(QueueGroup[StageEvent]):
    """Sends each event to the gateway of its request.

    Attributes:
        links: The gateways.
        sending: This process, as sender, and its limits.
        refused: Control messages of all gateways that were rejected, by error code.
    """

    def __init__(self, sending: Sending, links: Sequence[GatewayLink] = ()) -> None:
        super().__init__()
        self.sending: Final = sending
        self.refused: Final = Counter[str]()
        self.links: tuple[GatewayLink, ...] = ()
        self._closed_beats = 0, 0
        for each in links:
            self._take(each)

    @property
    def beats(self) -> tuple[int, int]:
        """Heartbeats that were sent, to all gateways together, and how many of them were late."""
        (sent, late), hearts = self._closed_beats, [each.heart for each in self.links]
        return sent + sum(each.sent for each in hearts), late + sum(each.late for each in hearts)

    def follow(
        self, found: Sequence[GatewayAddresses], connect: Callable[[GatewayAddresses], GatewayLink]
    ) -> bool:
        """Connect to gateways at new addresses, and close links to addresses that are not found any more.

        A gateway that answers keeps its link, whatever is found: it ends with the gateway.

        Returns:
            Whether there are other links than before.

        Raises:
            ConfigError: An address cannot be used.
            zmq.ZMQError: There is no further socket.
        """
        before = self.links
        wanted = {each.control: each for each in found}
        for link in before:
            if link.control.address not in wanted and link.name is None:
                self._leave(link)
        for each in wanted.keys() - {link.control.address for link in self.links}:
            self._take(connect(wanted[each]))
        return self.links != before

    def say_farewell(self, message: Farewell) -> None:
        """Tell all gateways that this replica ends; no heartbeat follows."""
        for each in self.links:
            each.heart.stop()
            each.control.send(message)

    def close(self) -> None:
        """Close all links; ZeroMQ delivers what it holds for a moment."""
        for each in self.links:
            self._leave(each, deliver=True)

    def put(self, message: StageEvent) -> int:
        """See :meth:`shared.transport.queues.PushQueue.put`; 0 bytes if the request's gateway is gone."""
        queue = self._of(message.request_id)
        return queue.put(message) if queue is not None else 0

    def stalls(self, request_id: str) -> bool:
        """Whether a request's gateway does not keep up."""
        queue = self._of(request_id)
        return queue is not None and queue.stalls(request_id)

    def _of(self, request_id: str) -> PushQueue[StageEvent] | None:
        if len(self.links) == 1:
            return self.links[0].events
        return next((each.events for each in self.links if each.owns(request_id)), None)

    def _take(self, link: GatewayLink) -> None:
        link.control.refused = self.refused
        self.add(link.control.address, link.events)
        self.links = (*self.links, link)

    def _leave(self, link: GatewayLink, deliver: bool = False) -> None:
        self.links = tuple(each for each in self.links if each is not link)
        sent, late = self._closed_beats
        self._closed_beats = sent + link.heart.sent, late + link.heart.late
        self.remove(link.control.address)
        link.close(deliver)


def sending_of(config: Config, name: StageName, instance: str) -> Sending:
    """A replica as sender, with its limits."""
    identity = control_identity(name, instance)
    return Sending(identity, config.window_bytes, config.stage(name).max_backlog_bytes)


def open_gateway(
    context: zmq.Context[zmq.Socket[bytes]],
    addresses: GatewayAddresses,
    config: Config,
    name: StageName,
    instance: str,
) -> GatewayLink:
    """Connect to a gateway, which need not be there yet.

    Raises:
        ConfigError: An address cannot be used.
        zmq.ZMQError: There is no further socket.
    """
    stage, identity = config.stage(name), control_identity(name, instance)
    control = ControlClient(context, addresses.control, identity)
    sending = sending_of(config, name, instance)
    try:
        events: PushQueue[StageEvent] = PushQueue(context, addresses.events, sending, "gateway")
    except (ConfigError, zmq.ZMQError):
        control.close()
        raise
    heart = HeartbeatThread(context, addresses.control, identity, stage.heartbeat_s)
    heart.start()
    return GatewayLink(control, heart, events, config.gateway.orphan_timeout_s)
