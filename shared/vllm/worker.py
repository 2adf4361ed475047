"""The worker of the two stages that draw tokens: vLLM's of this platform, with seeds that hold."""

from typing import Any

import torch
from vllm.platforms import current_platform

from shared.ending import end_process
from shared.vllm.platform import worker_base
from shared.vllm.sampling.generators import seed_of_draw
from shared.vllm.workers import in_worker, leave_ending_to_the_stage, unlink_shared_memory

_Worker: Any = worker_base()


class StageWorker(_Worker):
    """vLLM's worker, in which a seeded draw depends on nothing but the seed and the draws before it.

    Where a prompt is computed in pieces, vLLM draws a token after each, throws it away and turns the
    request's generator back.  A generator of the CPU cannot be turned back, and the step dies of it; so
    here such tokens are drawn without it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if in_worker():
            leave_ending_to_the_stage()

    def init_device(self) -> None:
        """Find the other workers."""
        super().init_device()
        if current_platform.is_cpu():
            # vLLM has small functions compiled at their first call (ranks of log probabilities): for seconds
            # nobody would be answered.
            torch.compiler.set_stance("force_eager")
        if in_worker():
            unlink_shared_memory()

    def shutdown(self) -> None:
        """End; a worker process does at once, for vLLM would collect its garbage first, for seconds."""
        if in_worker():
            end_process(0)
        super().shutdown()

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Draw the tokens of the step that was just computed."""
        spared = _seed_generators(self.model_runner)
        try:
            return super().sample_tokens(grammar_output)
        finally:
            self.model_runner.input_batch.generators.update(spared)


def _seed_generators(runner: Any) -> dict[int, Any]:
    """Seed the generators of the batch for the draws that follow.

    Returns:
        Those whose draw will be thrown away, by their place in the batch, which they were taken out of.
    """
    batch = runner.input_batch
    spared: dict[int, Any] = {}
    if not batch.generators:
        return spared
    discarded = runner.discard_request_mask.np[: batch.num_reqs].tolist()
    for index, generator in list(batch.generators.items()):
        if discarded[index]:
            spared[index] = batch.generators.pop(index)
        else:
            params = runner.requests[batch.req_ids[index]].sampling_params
            generator.manual_seed(seed_of_draw(params, len(batch.req_output_token_ids[index])))
    return spared
