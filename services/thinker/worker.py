"""The thinker's worker: what is read out of the model."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from services.thinker.scheduler import ThinkerStep
from shared.vllm.transfer import HostCopy, to_device
from shared.vllm.worker import StageWorker

if TYPE_CHECKING:
    from services.thinker.speaking import SpeakingModel


class ThinkerWorker(StageWorker):
    """The stages' worker, with methods for ``collective_rpc``.

    The rows of a step are on their way to the host before its tokens are sampled, so who has waited for
    these need not wait for rows.  Several workers all have the same rows; the first hands them over.
    """

    _rows: HostCopy | None = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the model on a step, and fetch its rows."""
        output = super().execute_model(scheduler_output)
        wanted = isinstance(scheduler_output, ThinkerStep) and scheduler_output.row_slots is not None
        if wanted and self.rank == 0:
            store = self._model().conditioning
            slots = to_device(scheduler_output.row_slots, store.layer.kv_cache.device)
            self._rows = HostCopy(*store.gather(slots))
        return output

    def read_rows(self) -> tuple[torch.Tensor, ...]:
        """Rows ``[n, hidden]`` and M-RoPE positions int64 ``[3, n]`` of the last step, on the host."""
        return () if self._rows is None else self._rows.wait()

    def embed_tokens(self, token_ids: list[int]) -> torch.Tensor:
        """What the model embeds token ids as for rows that no step computes, on the CPU."""
        model = self._model()
        with torch.inference_mode():
            return model.embed_text(torch.tensor(token_ids, device=model.step_embeds.device)).cpu()

    def _model(self) -> "SpeakingModel":
        model: SpeakingModel = self.model_runner.get_model()
        return model
