"""Whether a stage lives and whether it serves, for whoever asks over HTTP."""

from shared.stage.heartbeat import HeartbeatThread


class StageHealth:
    """What a stage knows of its own loop, from loading to the end.

    Args:
        step_timeout_s: A loop that has been in one step for longer counts as hung.
    """

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._heart: HeartbeatThread | None = None
        self._ended = False

    def loaded(self, heart: HeartbeatThread) -> None:
        """The engine is built; the loop will report to ``heart`` each time it comes round."""
        self._heart = heart

    def ended(self) -> None:
        """The loop has ended."""
        self._ended = True

    def why_not_live(self) -> str | None:
        """What is wrong with the process; none while it loads, and while its loop comes round."""
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
        """Why the stage takes no requests now; none if it does."""
        if self._heart is None:
            return "the model is being loaded"
        if self._heart.report is None:
            return "the stage's loop has not begun"
        if self._heart.report.draining:
            return "the stage was told to stop"
        return self.why_not_live()
