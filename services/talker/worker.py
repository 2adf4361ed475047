"""The talker's worker: puts the conditioning rows into KV memory, then computes the step."""

from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from services.talker.family import TalkerModel
from services.talker.scheduler import TalkerOutput, TalkerStep
from shared.vllm.sampling.arguments import arguments_of
from shared.vllm.sampling.seeds import seed_of_draw, uniform
from shared.vllm.transfer import to_device
from shared.vllm.worker import StageWorker


class TalkerWorker(StageWorker):
    """The stages' worker, with one thing to do before each step, and one behind it."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Write the step's rows, then run the model on it."""
        if isinstance(scheduler_output, TalkerStep) and scheduler_output.row_writes is not None:
            writes = scheduler_output.row_writes
            self._model().conditioning.scatter(writes.slots, writes.rows, writes.ids)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the first id of each frame, and let the model complete the frames that have more."""
        state, further = self.model_runner.execute_model_state, self._model().conditioning.further_ids
        if state is None or not further:
            return super().sample_tokens(grammar_output)
        draws = self._draws(further)
        return self._complete(state.sample_hidden_states, draws, super().sample_tokens(grammar_output))

    def _draws(self, further: int) -> list[list[float]]:
        """What decides about the further ids of each request's next frame; zeros where it is greedy."""
        batch, draws = self.model_runner.input_batch, []
        for name, drawn in zip(batch.req_ids, batch.req_output_token_ids, strict=True):
            params = self.model_runner.requests[name].sampling_params
            greedy = arguments_of(params).draws is None
            draws.append([0.0] * further if greedy else uniform(seed_of_draw(params, len(drawn)), further))
        return draws

    @torch.inference_mode()
    def _complete(
        self, hidden: torch.Tensor, draws: list[list[float]], output: ModelRunnerOutput
    ) -> TalkerOutput:
        # Nothing was sampled of a request whose prompt is not computed to its end.
        sampled = [index for index, tokens in enumerate(output.sampled_token_ids) if len(tokens)]
        further: list[list[int]] = []
        if sampled:
            codes = torch.tensor([output.sampled_token_ids[index][0] for index in sampled])
            decided = torch.tensor([draws[index] for index in sampled])
            given = [to_device(each, hidden.device) for each in (torch.tensor(sampled), codes, decided)]
            further = self._model().further_codes(hidden[given[0]], *given[1:]).tolist()
        names = [output.req_ids[index] for index in sampled]
        return TalkerOutput(**vars(output), further_codes=dict(zip(names, further, strict=True)))

    def _model(self) -> TalkerModel:
        model: TalkerModel = self.model_runner.get_model()
        return model
