"""Health checks of a stage."""

from shared.stage.heartbeat import HeartbeatThread


class StageHealth:
    """The state of a stage's loop, from loading to its end.

    Args:
        step_timeout_s: A loop that has been in one step for longer counts as hung.
    """

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._heart: HeartbeatThread | None = None
        self._ended = False

    def loaded(self, heart: HeartbeatThread) -> None:
        """The engine is loaded; the loop will report to ``heart``."""
        self._heart = heart

    def ended(self) -> None:
        """The loop has ended."""
        self._ended = True

    def why_not_live(self) -> str | None:
        """Why the process is not live; None while it loads and while its loop runs."""
        if self._ended:
            return "the stage's loop has ended"
        report = self._heart.report if self._heart is not None else None
        if report is not None and report.busy_s > self._step_timeout_s:
            return (
                f"the stage's loop has been in one step for {report.busy_s:.0f} s, "
                f"longer than gateway.step_timeout_s ({self._step_timeout_s:g} s)"
            )
        return None

    def why_not_ready(self) -> str | None:
        """Why the stage takes no requests now; None if it does."""
        if self._heart is None:
            return "the model is being loaded"
        if self._heart.report is None:
            return "the stage's loop has not begun"
        if self._heart.report.draining:
            return "the stage was told to stop"
        return self.why_not_live()
