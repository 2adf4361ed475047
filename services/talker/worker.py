"""The talker's worker: puts the conditioning rows into KV memory, then computes the step."""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput

from shared.vllm.worker import StageWorker

if TYPE_CHECKING:
    from services.talker.scheduler import RowWrites


class TalkerWorker(StageWorker):
    """The stages' worker, with one thing to do before each step."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Write the step's rows, then run the model on it."""
        writes: RowWrites | None = getattr(scheduler_output, "row_writes", None)
        if writes is not None:
            store = self.model_runner.get_model().conditioning
            store.scatter(writes.slots, writes.rows, writes.positions)
        return super().execute_model(scheduler_output)
