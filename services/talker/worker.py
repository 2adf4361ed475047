"""The talker's worker: puts the conditioning rows into KV memory, then computes the step."""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput

from shared.engine.platform import worker_base

if TYPE_CHECKING:
    from services.talker.scheduler import RowWrites

_Worker: Any = worker_base()


class TalkerWorker(_Worker):
    """vLLM's worker of this platform, with one thing to do before each step."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Write the step's rows, then run the model on it."""
        writes: RowWrites | None = getattr(scheduler_output, "row_writes", None)
        if writes is not None:
            store = self.model_runner.get_model().conditioning
            store.scatter(writes.slots, writes.rows, writes.positions)
        return super().execute_model(scheduler_output)
