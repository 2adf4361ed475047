"""What the gateway sends to stages, as an interface."""

from typing import Protocol

from shared.messages import ControlToStage, StageName, ThinkerInput


class StagePort(Protocol):
    """See :class:`gateway.dispatch.stage_transport.StageTransport`."""

    def think(self, request: ThinkerInput) -> None:
        """Send a request, or the beginning of one, to its thinker; QueueFullError if its queue is full."""

    def tell(self, stage: StageName, replica: str, message: ControlToStage) -> None:
        """Send a control message, if the replica can be reached: what must arrive is repeated."""

    def reach(self, thinkers: dict[str, str]) -> None:
        """Keep connections to exactly these thinkers (name to address)."""

    def breaks(self) -> dict[str, int]:
        """Number of lost connections per thinker; only those with at least one."""
        ...
