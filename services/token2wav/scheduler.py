"""Schedules chunks: an engine step advances all active ones by one, as far as there is room.

A request's tokens are the advances of its chunk, with a solver its steps and further pieces of audio.  So
advancing all active requests by one is what vLLM calls chunked prefill with a chunk of one token.  There is
no KV cache; what bounds a step, and so how long an abort or an urgent chunk waits for its end, is what its
advances cost: units that a solver advances, and units that become audio (mel frames, with Qwen2.5-Omni).
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from services.token2wav.chunks import CHUNK_KEY, SynthesisChunk
from services.token2wav.family import Budget, Work
from shared.config import SynthesisConfig
from shared.playback import has_slack
from shared.vllm.scheduling import StageScheduler

SYNTHESIS_KEY = "synthesis"
PLAYBACK_MARGIN_KEY = "playback_margin_s"
RECORDS_KEY = "records"
"""Of ``additional_config``, by which the engine's parts are told."""


class SynthesisScheduler(StageScheduler):
    """vLLM's scheduler with a budget of its own.

    While some chunk is due within ``additional_config["playback_margin_s"]``, those due later wait.

    In a step the solver advances at most ``max_batch_frames`` units, or one chunk that has more, and at most
    ``max_vocoder_frames`` become audio (:class:`shared.config.SynthesisConfig`).  Who was left out for want
    of room longest goes first, then who is due first: so a long chunk and the others take turns.  Of the
    waiting ones none overtakes another, unless that can wait.

    A chunk that is alone takes as many advances at once as fit, for there is nobody to wait for.
    ``work`` is set when the engine is built, before any request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        additional = self.vllm_config.additional_config
        synthesis = synthesis_of(additional)
        self._budget = Budget(synthesis.max_batch_frames, synthesis.max_vocoder_frames)
        self._margin_s = float(additional[PLAYBACK_MARGIN_KEY])
        self.work: Work
        self._room = self._budget
        # Steps for which a request was left out for want of room since it last had some.
        self._waited: Counter[str] = Counter()
        self._ahead: set[str] = set()
        # The next one in line, if it joins at this step; none as soon as one behind it does not.
        self._joins: str | None = None
        self.solver_steps = 0
        # vLLM switches both off for models without a KV cache.
        self.scheduler_config.enable_chunked_prefill = True
        self.scheduler_config.long_prefill_token_threshold = 1

    def forget_steps(self) -> None:
        """See :meth:`StageScheduler.forget_steps`."""
        super().forget_steps()
        self.solver_steps = 0

    def can_run(self, request: Request) -> bool:
        """Whether a chunk has a place, or there is one: it gets none of another's, also as a suspect."""
        placed = request in self.running or len(self.running) < self.max_num_active_reqs
        return placed and super().can_run(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Choose who advances, and by how much, then schedule them."""
        self.pass_over(self._choose())
        self.max_num_scheduled_tokens = self._tokens_at_once()
        output = super().schedule(throttle_prefills)
        self.solver_steps += sum(self._solved(*taken) for taken in output.num_scheduled_tokens.items())
        return output

    def _choose(self) -> list[Request]:
        """Share the next step's room among running requests and the next in line; gives those left out."""
        running = [request for request in self.running if self.may_run(request)]
        left_out = [request for request in self.running if request not in running]
        waiting = [request for request in self.waiting if self.may_run(request)]
        due = {request.request_id: _chunk_of(request).due for request in [*running, *waiting]}
        self._ahead = has_slack(due, self._margin_s)
        joining = [request for request in waiting if request.request_id not in self._ahead][:1]
        self._room = self._budget
        order = {name: (-self._waited[name], moment) for name, moment in due.items()}
        for request in sorted([*running, *joining], key=lambda each: order[each.request_id]):
            if request.request_id in self._ahead:
                left_out.append(request)
            elif self._take_room(request):
                del self._waited[request.request_id]
            else:
                left_out.append(request)
                self._waited[request.request_id] += 1
        self._waited = Counter({name: steps for name, steps in self._waited.items() if name in self.requests})
        self._joins = next((each.request_id for each in joining if each not in left_out), None)
        return [request for request in left_out if request not in joining]

    def _take_room(self, request: Request) -> bool:
        """Take the room that a request's next advance needs, if it is there; more than all is all of it."""
        cost = self.work.cost(_chunk_of(request), request.num_computed_tokens)
        room, whole = self._room, self._budget
        if any(taken > left < all_ for taken, left, all_ in zip(cost, room, whole, strict=True)):
            return False
        self._room = Budget(max(0, room.solver - cost.solver), max(0, room.vocoder - cost.vocoder))
        return True

    def _tokens_at_once(self) -> int:
        """Tokens of the next step: one of each request, or as many of a single one as the budget allows."""
        if len(self.requests) != 1:
            return self.max_num_running_reqs
        [request] = self.requests.values()
        chunk, room, done = _chunk_of(request), self._budget, request.num_computed_tokens
        for taken in range(request.num_prompt_tokens - done):
            cost = self.work.cost(chunk, done + taken)
            room = Budget(room.solver - cost.solver, room.vocoder - cost.vocoder)
            if min(room) < 0:
                return max(1, taken)
        return max(1, request.num_prompt_tokens - done)

    def _solved(self, request_id: str, taken: int) -> int:
        """How many of the tokens that a request was just given are solver steps."""
        request = self.requests[request_id]
        chunk, done = _chunk_of(request), request.num_computed_tokens
        return sum(self.work.cost(chunk, token).solver > 0 for token in range(done - taken, done))

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Say whether a waiting request may start: vLLM's hook, which keeps its place if it may not."""
        if not super()._handle_blocked_waiting_request(request) or request.request_id in self._ahead:
            return False
        if self._joins is not None and request.request_id != self._joins and not self._take_room(request):
            self._joins = None
        return self._joins is not None

    def out_of_turn(self) -> set[str]:
        """None: a stream has one chunk here at a time, so streams take turns, whoever asked for them."""
        return set()

    def may_displace(self, _: Request) -> bool:
        """Never: the model holds what was computed of a chunk, so it is not computed again."""
        return False


def _chunk_of(request: Request) -> SynthesisChunk:
    """The chunk that rides in a request's parameters."""
    params: Any = request.pooling_params
    chunk: SynthesisChunk = params.extra_kwargs[CHUNK_KEY]
    return chunk


def records(additional: Mapping[str, Any]) -> bool:
    """Whether what is computed again and again is to be recorded, by ``additional_config``."""
    return additional[RECORDS_KEY] is True


def synthesis_of(additional: Mapping[str, Any]) -> SynthesisConfig:
    """How chunks are made, by ``additional_config``."""
    return SynthesisConfig.model_validate(additional[SYNTHESIS_KEY])
