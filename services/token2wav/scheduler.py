"""Schedules solver steps: every engine step advances all active chunks by one.

A request's tokens are its solver steps, so advancing all active requests by one step is what vLLM
calls chunked prefill with a chunk of one token; a request that is alone takes all its remaining steps
at once, for there is nobody to wait for.  There is no KV cache; what bounds the batch is mel frames.
"""

from functools import partial
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from services.token2wav.checkpoint import component_configs
from services.token2wav.synthesis import CHUNK_KEY, SynthesisChunk, validate_chunk
from shared.engine.playback import far_ahead
from shared.engine.scheduling import StageScheduler
from shared.errors import ConfigError, InvalidRequestError

MAX_BATCH_FRAMES_KEY = "max_batch_frames"
PLAYBACK_MARGIN_KEY = "playback_margin_s"


class DiffusionScheduler(StageScheduler):
    """vLLM's scheduler with a memory budget in mel frames and without trust in parameters.

    While some chunk is due within ``additional_config["playback_margin_s"]``, those due later wait.

    The budget is ``additional_config["max_batch_frames"]``: running chunks' windows together have at
    most that many frames.  What does not fit waits, and nothing overtakes it: else a large chunk could
    wait for ever.  A chunk larger than the budget runs alone.

    Raises:
        ConfigError: the budget is missing or not a positive integer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        additional = self.vllm_config.additional_config
        budget = additional.get(MAX_BATCH_FRAMES_KEY) if isinstance(additional, dict) else None
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise ConfigError(
                f"additional_config.{MAX_BATCH_FRAMES_KEY} is {budget!r}, not a positive integer"
            )
        self._max_batch_frames = budget
        self._margin_s = float(additional.get(PLAYBACK_MARGIN_KEY, 0))
        self._dit_config, _ = component_configs(self.vllm_config.model_config.hf_config)
        self._unchecked: list[Request] = []
        self._budget_spent = False
        # vLLM switches both off for models without a KV cache.
        self.scheduler_config.enable_chunked_prefill = True
        self.scheduler_config.long_prefill_token_threshold = 1

    def add_request(self, request: Request) -> None:
        """Queue a request; whether it can be served is found out when scheduling, where it can fail."""
        super().add_request(request)
        self._unchecked.append(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Refuse new requests that cannot be served, then schedule the others."""
        unchecked, self._unchecked = self._unchecked, []
        for request in unchecked:
            if not request.is_finished():
                self.prepare(request.request_id, partial(self._check, request))
        self._budget_spent = False
        due = {request.request_id: _chunk_of(request).due for request in [*self.running, *self._admissible()]}
        held = far_ahead(due, self._margin_s)
        self.pass_over([request for request in self.running if request.request_id in held])
        return super().schedule(throttle_prefills)

    def _admissible(self) -> list[Request]:
        """The waiting request that joins at this step, if one does."""
        if not self.waiting or len(self.running) >= self.max_num_running_reqs:
            return []
        first = self.waiting.peek_request()
        return [] if self._exceeds_budget(first) else [first]

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Say whether a waiting request may start: vLLM's hook, which keeps its place if it may not."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        self._budget_spent = self._budget_spent or self._exceeds_budget(request)
        return not self._budget_spent

    def _exceeds_budget(self, request: Request) -> bool:
        running = sum(self._frames(other) for other in self.running)
        return bool(self.running) and running + self._frames(request) > self._max_batch_frames

    def _frames(self, request: Request) -> int:
        return _chunk_of(request).window_frames(self._dit_config.repeats)

    def _check(self, request: Request) -> None:
        chunk = _chunk_of(request)
        validate_chunk(chunk, self._dit_config)
        if request.num_prompt_tokens != chunk.steps:
            raise InvalidRequestError(
                f"the prompt has {request.num_prompt_tokens} tokens for {chunk.steps} solver steps"
            )


def _chunk_of(request: Request) -> SynthesisChunk:
    """Return the chunk of a request: its parameters alone say that it is one of diffusion.

    Raises:
        InvalidRequestError: they do not carry one.
    """
    extra = request.pooling_params.extra_kwargs if request.pooling_params is not None else None
    chunk = (extra or {}).get(CHUNK_KEY)
    if not isinstance(chunk, SynthesisChunk):
        raise InvalidRequestError(f"pooling_params.extra_kwargs[{CHUNK_KEY!r}] holds no SynthesisChunk")
    return chunk
