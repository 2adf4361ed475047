"""What the gateway sends to stages, as an interface."""

from typing import Protocol

from shared.messages import Peers, StageName, ThinkerInput


class StagePort(Protocol):
    """See :class:`gateway.dispatch.stage_transport.StageTransport`."""

    def think(self, request: ThinkerInput) -> None:
        """Send a request, or the beginning of one, to its thinker; QueueFullError if its queue is full."""
        ...

    def abort(self, stage: StageName, replica: str, request_id: str) -> None:
        """Tell a replica to drop an attempt."""
        ...

    def begin_alone(self, stage: StageName, replica: str, request_id: str) -> None:
        """Let a replica begin with an attempt that is alone there."""
        ...

    def end_alone(self, stage: StageName, replica: str, request_id: str) -> None:
        """Let a replica take others beside an attempt that was alone there."""
        ...

    def tell(self, stage: StageName, replica: str, peers: Peers) -> None:
        """Answer a replica's heartbeat."""
        ...

    def say_goodbye(self, stage: StageName, replica: str) -> None:
        """Tell a replica that this gateway stops."""
        ...

    def reach(self, thinkers: dict[str, str]) -> None:
        """Keep connections to exactly these thinkers (name to address)."""
        ...

    def breaks(self) -> dict[str, int]:
        """Number of lost connections per thinker; only those with at least one."""
        ...
