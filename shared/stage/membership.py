"""A replica's place in the stack: whose requests it takes, where it sends, how it ends."""

import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final

from shared.messages import MAX_REPLICAS, Peers, Route, StageName
from shared.stage.gateways import GatewayLink, GatewayQueues
from shared.transport.routing import PeerQueues


class Membership:
    """One replica's place in the stack, with any number of gateways.

    Attributes:
        queues: To all gateways that it may take requests of.
        news: Something changed that the gateways must know.
    """

    def __init__(
        self,
        stage: StageName,
        instance: str,
        inbox: str,
        gateways: GatewayQueues,
        peers: PeerQueues[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage: Final[StageName] = stage
        self.instance: Final = instance
        self.inbox: Final = inbox
        self.queues: Final = gateways
        self.news = False
        self._peers = peers
        self._clock = clock
        self._drain_until: float | None = None

    @property
    def gateways(self) -> tuple[GatewayLink, ...]:
        """All gateways that it may take requests of."""
        return self.queues.links

    @property
    def joined(self) -> list[GatewayLink]:
        """The gateways whose requests it takes."""
        return [each for each in self.gateways if each.name is not None]

    @property
    def peers(self) -> list[str]:
        """The connected replicas of the next stage."""
        return self._peers.names if self._peers is not None else []

    @property
    def breaks(self) -> dict[str, int]:
        """How often the connection to each was lost; see :attr:`shared.messages.Heartbeat.breaks`."""
        return self._peers.breaks if self._peers is not None else {}

    @property
    def draining(self) -> bool:
        """Whether the replica was told to stop."""
        return self._drain_until is not None

    def hear(self, gateway: GatewayLink, message: Peers) -> bool:
        """Take a gateway's message, and connect to the replicas of the next stage that it names.

        Returns:
            Whether the gateway is a new one, so that requests of its predecessor are orphans.
        """
        joins = gateway.hear(message)
        if message.replicas is None and self._peers is not None:
            # It knows no others than those.
            gateway.replicas = self._peers.asked
        changed = self._peers is not None and self._peers.reach(self._replicas())
        self.news = self.news or joins or changed
        return joins

    def leave(self, gateway: GatewayLink) -> None:
        """A gateway is gone: its requests are orphans."""
        gateway.leave()
        self.news = True

    def concerns(self, request_id: str, route: Route | None) -> bool:
        """Whether a message is for this process, not of a gateway that is gone or for an earlier process."""
        if self.joined and self.owner(request_id) is None:
            return False
        return route is None or route.replica(self.stage) == self.instance

    def owner(self, request_id: str) -> GatewayLink | None:
        """The gateway of a request; None if none that it has joined."""
        return next((each for each in self.gateways if each.owns(request_id)), None)

    def knows(self, alone: str | None) -> bool:
        """Whether each gateway has confirmed which of its requests is computed alone, if any."""
        return all(each.alone == each.own(alone) for each in self.joined)

    def drain(self, grace_s: float) -> None:
        """End when no gateway needs it, at the latest after ``grace_s``."""
        self._drain_until = self._clock() + grace_s
        self.news = True

    def may_end(self) -> bool:
        """Whether a draining replica may end now: without a gateway nobody waits for what it still has."""
        if self._drain_until is None:
            return False
        return all(each.released for each in self.joined) or self._clock() >= self._drain_until

    def _replicas(self) -> Mapping[str, str]:
        """The replicas of the next stage that any gateway names: one that has just started knows few."""
        named: dict[str, str] = {}
        for each in self.joined:
            # Where two give different addresses for one replica, the first one's holds.
            named = {**each.replicas, **named}
        return dict(islice(sorted(named.items()), MAX_REPLICAS))
