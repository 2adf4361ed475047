"""Which stages are there, learned from their heartbeats."""

import time
from collections.abc import Callable, Iterable

from gateway.status import StageState, StageStatus
from shared.errors import StageUnavailableError
from shared.messages import STAGES, Heartbeat, StageName


class StageRegistry:
    """The last heartbeat of each stage.

    Args:
        timeout_s: A stage that is silent for longer is down.
        step_timeout_s: So is one whose loop has been in the same step for longer.
        clock: Gives monotonic seconds.
    """

    def __init__(
        self, timeout_s: float, step_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._last: dict[StageName, tuple[float, Heartbeat]] = {}
        self._down: set[StageName] = set()

    def note(self, heartbeat: Heartbeat) -> bool:
        """Take a heartbeat.

        Returns:
            True if another process has taken the stage's place, which knows nothing of old requests.
        """
        last = self._last.get(heartbeat.stage)
        self._last[heartbeat.stage] = (self._clock(), heartbeat)
        if not self._lost(heartbeat.stage):
            self._down.discard(heartbeat.stage)
        return last is not None and last[1].instance != heartbeat.instance

    def newly_down(self) -> list[StageName]:
        """The stages that fell silent, or hang, since the last call."""
        lost = [stage for stage in self._last if stage not in self._down and self._lost(stage)]
        self._down.update(lost)
        return lost

    def state(self, stage: StageName) -> StageState:
        """What is known of a stage: ``starting`` before its first heartbeat."""
        last = self._last.get(stage)
        if last is None:
            return "starting"
        return "down" if stage in self._down or self._lost(stage) else "ready"

    def heartbeat_age_s(self, stage: StageName) -> float | None:
        """Seconds since the last heartbeat of a stage; none before the first."""
        last = self._last.get(stage)
        return self._clock() - last[0] if last else None

    def require(self, stages: Iterable[StageName]) -> None:
        """Check that stages are ready.

        Raises:
            StageUnavailableError: Naming those that are not.
        """
        missing = [f"{stage} is {self.state(stage)}" for stage in stages if self.state(stage) != "ready"]
        if missing:
            raise StageUnavailableError(f"cannot serve this request now: {', '.join(missing)}")

    def speakers(self) -> list[str]:
        """Names of all voices that any stage knows, in the order the stages give them."""
        names = (name for _, beat in self._last.values() for name in beat.limits.speakers)
        return list(dict.fromkeys(names))

    def max_positions(self, stage: StageName) -> int | None:
        """Most positions of one request at a stage; none if it has not said so."""
        last = self._last.get(stage)
        return (last[1].limits.max_positions or None) if last else None

    def report(self) -> list[StageStatus]:
        """All stages, for the status."""
        return [self._status(stage) for stage in STAGES]

    def _lost(self, stage: StageName) -> bool:
        seen, beat = self._last[stage]
        return self._clock() - seen > self._timeout_s or beat.busy_s > self._step_timeout_s

    def _status(self, stage: StageName) -> StageStatus:
        last = self._last.get(stage)
        if last is None:
            return StageStatus(name=stage, state="starting")
        seen, beat = last
        return StageStatus(
            name=stage,
            state=self.state(stage),
            heartbeat_age_s=self._clock() - seen,
            pid=beat.pid,
            peak_memory_bytes=beat.peak_memory_bytes,
            load=beat.load,
            limits=beat.limits,
        )
