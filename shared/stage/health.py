"""Health checks of a stage."""

from typing import Protocol

from shared.messages import Heartbeat


class Reporter(Protocol):
    """Whoever knows what the loop said last."""

    @property
    def report(self) -> Heartbeat | None:
        """The loop's last report, with the time since then; None before the first."""
        ...


class StageHealth:
    """The state of a stage's loop, from loading to its end.

    Args:
        step_timeout_s: A loop that has been in one step for longer counts as hung.
    """

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._reporter: Reporter | None = None
        self._ended = False

    def loaded(self, reporter: Reporter) -> None:
        """The engine is loaded; what the loop reports is there."""
        self._reporter = reporter

    def ended(self) -> None:
        """The loop has ended."""
        self._ended = True

    def why_not_live(self) -> str | None:
        """Why the process is not live; None while it loads and while its loop runs."""
        if self._ended:
            return "the stage's loop has ended"
        report = self._reporter.report if self._reporter is not None else None
        if report is not None and report.busy_s > self._step_timeout_s:
            return (
                f"the stage's loop has been in one step for {report.busy_s:.0f} s, "
                f"longer than gateway.step_timeout_s ({self._step_timeout_s:g} s)"
            )
        return None

    def why_not_ready(self) -> str | None:
        """Why the stage takes no requests now; None if it does."""
        if self._reporter is None:
            return "the model is being loaded"
        if self._reporter.report is None:
            return "the stage's loop has not begun"
        if self._reporter.report.draining:
            return "the stage was told to stop"
        return self.why_not_live()
