"""A replica's relation to its gateway: whose requests it takes, where it sends, when it may end."""

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from shared.messages import MISSED_HEARTBEATS, Peers, Route, StageName
from shared.transport.routing import PeerQueues

log = logging.getLogger(__name__)


class Membership:
    """One replica's place in the stack.

    Attributes:
        gateway: The gateway whose requests it takes; None until one is known.
        news: Something changed that the gateway must know.
    """

    def __init__(
        self,
        stage: StageName,
        instance: str,
        inbox: str,
        peers: PeerQueues[Any] | None = None,
        orphan_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage: Final[StageName] = stage
        self.instance: Final = instance
        self.gateway: str | None = None
        self.news = False
        self.inbox: Final = inbox
        self._peers = peers
        self._orphan_timeout_s = orphan_timeout_s
        self._clock = clock
        self._heard = 0.0
        self._heartbeat_s = 0.0
        self._drain_until: float | None = None
        self._released = False

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

    def joins(self, message: Peers) -> bool:
        """Take the gateway's message; True if it is a new gateway, so that all requests are orphans."""
        self._heard = self._clock()
        self._heartbeat_s = message.heartbeat_s
        self._released = message.released
        if message.gateway == self.gateway:
            return False
        log.info("joined the gateway %s", message.gateway)
        self.gateway = message.gateway
        self.news = True
        return True

    def reach(self, message: Peers) -> None:
        """Connect to the replicas of the next stage."""
        told = message.replicas
        if self._peers is not None and told is not None and self._peers.reach(told):
            self.news = True

    def leave(self) -> None:
        """The gateway is gone."""
        log.info("left the gateway %s", self.gateway)
        self.gateway = None
        self.news = True

    @property
    def abandoned(self) -> bool:
        """Whether the gateway has been silent for too long."""
        silent_s = max(self._orphan_timeout_s, MISSED_HEARTBEATS * self._heartbeat_s)
        return self.gateway is not None and self._clock() - self._heard > silent_s

    def concerns(self, request_id: str, route: Route | None) -> bool:
        """Whether a message is for this process, not of an earlier gateway or for an earlier process."""
        if self.gateway is not None and not request_id.startswith(self.gateway):
            return False
        return route is None or route.replica(self.stage) == self.instance

    def drain(self, grace_s: float) -> None:
        """End when idle, at the latest after ``grace_s``."""
        self._drain_until = self._clock() + grace_s
        self.news = True

    def may_end(self, idle: bool) -> bool:
        """Whether a draining replica may end now; ``idle`` means that no request is active."""
        if self._drain_until is None:
            return False
        if self.gateway is None:
            return idle
        return self._released or self._clock() >= self._drain_until
