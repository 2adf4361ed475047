"""Schedules solver steps: every engine step advances all active chunks by one.

A request's tokens are its solver steps, so advancing all active requests by one step is what vLLM
calls chunked prefill with a chunk of one token.  At the last of them the vocoder makes the chunk audio, or
the first piece of it; each further piece is one more token.  There is no KV cache; what bounds a step, and so
how long an abort or an urgent chunk waits for its end, is mel frames: those that the solver advances, and
those that become audio.
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
MAX_VOCODER_FRAMES_KEY = "max_vocoder_frames"
PLAYBACK_MARGIN_KEY = "playback_margin_s"


class DiffusionScheduler(StageScheduler):
    """vLLM's scheduler with budgets in mel frames and without trust in parameters.

    While some chunk is due within ``additional_config["playback_margin_s"]``, those due later wait.

    In a step the solver advances at most ``additional_config["max_batch_frames"]`` frames.  A chunk whose
    window does not fit beside the others waits, and nothing overtakes it: else a large one could wait for
    ever.  One larger than the budget runs alone.  A chunk that is alone takes as many solver steps at once as
    fit, for there is nobody to wait for.

    At most ``additional_config["max_vocoder_frames"]`` frames become audio in a step, those due first.  A
    chunk with more does so in pieces.

    Attributes:
        max_vocoder_frames: that budget.
        solver_steps: of all chunks so far.

    Raises:
        ConfigError: a budget is missing or not a positive integer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        additional = self.vllm_config.additional_config
        self._max_batch_frames = _budget(additional, MAX_BATCH_FRAMES_KEY)
        self.max_vocoder_frames = _budget(additional, MAX_VOCODER_FRAMES_KEY)
        self._margin_s = float(additional.get(PLAYBACK_MARGIN_KEY, 0))
        self._dit_config, _ = component_configs(self.vllm_config.model_config.hf_config)
        self._unchecked: list[Request] = []
        self._budget_spent = False
        self.solver_steps = 0
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
        self.pass_over(self._held())
        self.max_num_scheduled_tokens = self._tokens_at_once()
        output = super().schedule(throttle_prefills)
        self.solver_steps += sum(self._solved(*taken) for taken in output.num_scheduled_tokens.items())
        return output

    def _held(self) -> list[Request]:
        """The running requests that are left out of the next step."""
        due = {request.request_id: _chunk_of(request).due for request in [*self.running, *self._admissible()]}
        ahead = far_ahead(due, self._margin_s)
        held = []
        room = self.max_vocoder_frames
        for request in sorted(self.running, key=lambda request: due[request.request_id]):
            frames = self._vocoder_frames(request)
            if request.request_id in ahead or frames > room:
                held.append(request)
            else:
                room -= frames
        return held

    def _tokens_at_once(self) -> int:
        """Tokens of the next step: one of each request, or as many of a single one as the budgets allow."""
        if len(self.requests) != 1:
            return self.max_num_running_reqs
        [request] = self.requests.values()
        left = _chunk_of(request).steps - request.num_computed_tokens
        return max(1, min(left, self._max_batch_frames // self._frames(request)))

    def _vocoder_frames(self, request: Request) -> int:
        """Most mel frames of a request that its next token makes audio."""
        chunk = _chunk_of(request)
        if request.num_computed_tokens < chunk.steps - 1:
            return 0
        return min(chunk.target_frames, self.max_vocoder_frames)

    def _solved(self, request_id: str, taken: int) -> int:
        """How many of the tokens that a request was just given are solver steps."""
        request = self.requests[request_id]
        left = _chunk_of(request).steps - (request.num_computed_tokens - taken)
        return max(0, min(taken, left))

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
        tokens = chunk.tokens(self.max_vocoder_frames)
        if request.num_prompt_tokens != tokens:
            raise InvalidRequestError(
                f"the prompt has {request.num_prompt_tokens} tokens for {chunk.steps} solver steps and "
                f"{tokens - chunk.steps} more pieces of audio"
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


def _budget(additional: object, key: str) -> int:
    budget = additional.get(key) if isinstance(additional, dict) else None
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ConfigError(f"additional_config.{key} is {budget!r}, not a positive integer")
    return budget
