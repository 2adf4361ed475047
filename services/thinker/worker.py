"""The thinker's worker: what its model must know of a step, and what is read out of the model."""

from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from shared.vllm.worker import StageWorker

if TYPE_CHECKING:
    from services.thinker.speaking import SpeakingModel

PROMPT_TOKENS: Final = "prompt_tokens"
"""Key of a request's extra sampling arguments: how many of its tokens are the prompt; the others are a reply
that is read again."""


class ThinkerWorker(StageWorker):
    """The stages' worker, with methods for ``collective_rpc``."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Tell the model which prompts begin, then run it on the step."""
        self._model().prompt_lengths = {
            id(new.prompt_token_ids): new.sampling_params.extra_args[PROMPT_TOKENS]
            for new in scheduler_output.scheduled_new_reqs
            if new.sampling_params is not None and new.sampling_params.extra_args
        }
        return super().execute_model(scheduler_output)

    def read_rows(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[n, hidden]`` and M-RoPE positions int64 ``[3, n]`` at KV slots ``[n]``, on the CPU."""
        store = self._model().conditioning
        rows, positions = store.gather(slots.to(store.layer.kv_cache.device))
        return rows.cpu(), positions.cpu()

    def embed_tokens(self, token_ids: list[int]) -> torch.Tensor:
        """Text embeddings ``[n, hidden]`` of token ids, on the CPU."""
        model = self._model()
        with torch.inference_mode():
            return model.embed_text(torch.tensor(token_ids, device=model.step_embeds.device)).cpu()

    def _model(self) -> "SpeakingModel":
        model: SpeakingModel = self.model_runner.get_model()
        return model
