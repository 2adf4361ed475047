"""Prompts that are computed ahead of their requests, while no request needs the thinker."""

from collections import deque
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import Metric
from vllm.inputs import MultiModalInput, TokensInput, tokens_input
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import BusyError, InvalidRequestError
from services.thinker.media.preparer import EARLY_RETRY_MS, MediaPreparer
from services.thinker.media.rules import MediaRules
from services.thinker.scheduler import EARLY, PROMPT_TOKENS, SPEECH
from shared.messages import PrefillDone, PrefillRequest, PromptUsage, Sampling, StageEvent, StageName
from shared.metrics import counter
from shared.stage.service import Failures
from shared.transport.routing import Outlet
from shared.vllm.sampling.generation import sampling_params, submit

MAX_PREFILLS: Final = 8
"""Prompts at a time that are computed ahead."""
PRIORITY: Final = 10_000
"""Behind that of any request."""
_STAGE: Final[StageName] = "thinker"


class Prefills:
    """The prompts that are computed ahead, media prepared for one at a time; the gateway learns of each."""

    def __init__(
        self,
        engine: LLMEngine,
        rules: MediaRules,
        preparer: MediaPreparer,
        gateway: Outlet[StageEvent],
        end_tokens: list[int],
    ) -> None:
        cached = engine.vllm_config.cache_config.enable_prefix_caching
        self.most: Final = MAX_PREFILLS if cached else 0
        self._engine = engine
        self._rules = rules
        self._preparer = preparer
        self._gateway = gateway
        self._end_tokens = end_tokens
        self._queued: deque[PrefillRequest] = deque()
        self._preparing: str | None = None
        # By the engine's name: ours.
        self._computing: dict[str, str] = {}
        self._tokens = 0
        self._computed_tokens = 0

    def __contains__(self, request_id: str) -> bool:
        """Whether a prompt is in work."""
        return request_id in self.ids()

    def ids(self) -> list[str]:
        """All prompts in work."""
        prepared = [self._preparing] if self._preparing is not None else []
        return [*(each.request_id for each in self._queued), *prepared, *self._computing.values()]

    def accept(self, request: PrefillRequest) -> None:
        """Take a prompt, whose tokens and length were checked; raises BusyError if there are too many."""
        if len(self.ids()) >= self.most:
            raise BusyError(f"{self.most} prompts are being computed early, the maximum", EARLY_RETRY_MS)
        if request.recording_continues:
            sound = self._rules.placeholders.get("audio")
            if not request.media or request.prompt_token_ids[-1] != sound:
                raise InvalidRequestError("recording_continues: the prompt does not end with a recording")
        self._queued.append(request)

    def begin(self, failures: Failures) -> None:
        """Begin with the next prompts, unless the media of another one are being prepared."""
        while self.has_queued:
            request = self._queued.popleft()
            if request.media:
                self._preparing = request.request_id
                self._preparer.submit(request)
            else:
                with failures.only(request.request_id):
                    self.compute(request, tokens_input(request.prompt_token_ids))

    @property
    def has_queued(self) -> bool:
        """The next prompt can begin."""
        return bool(self._queued) and self._preparing is None

    def prepared(self, request_id: str) -> bool:
        """Note that the media of a prompt are prepared, or cannot be; returns whether it is one of these."""
        if request_id != self._preparing:
            return False
        self._preparing = None
        return True

    def compute(self, request: PrefillRequest, prompt: TokensInput | MultiModalInput) -> None:
        """Give a prompt to the engine."""
        length = len(prompt["prompt_token_ids"])
        # vLLM computes no prompt without drawing a token behind it; this one is thrown away.
        params = sampling_params(
            Sampling(max_tokens=1),
            stage=_STAGE,
            seed=0,
            stop_token_ids=self._end_tokens,
            room=self._engine.model_config.max_model_len - length,
            extra_args={SPEECH: False, PROMPT_TOKENS: length, EARLY: True},
        )
        engine_id = submit(self._engine, request.request_id, prompt, params, PRIORITY)
        self._computing[engine_id] = request.request_id

    def name_of(self, engine_id: str) -> str | None:
        """The prompt that the engine calls so."""
        return self._computing.get(engine_id)

    def take(self, output: RequestOutput) -> None:
        """Take the engine's output for a prompt."""
        if not output.finished:
            return
        for engine_id, request_id in list(self._computing.items()):
            if request_id == output.request_id:
                del self._computing[engine_id]
        self._preparer.release(output.request_id)
        tokens = len(output.prompt_token_ids or [])
        usage = PromptUsage(tokens=tokens, cached_tokens=min(output.num_cached_tokens or 0, tokens))
        self._tokens += usage.tokens
        self._computed_tokens += usage.tokens - usage.cached_tokens
        self._gateway.put(PrefillDone(request_id=output.request_id, prompt=usage))

    def drop(self, request_id: str) -> None:
        """Drop a prompt, if it is here."""
        self._queued = deque(each for each in self._queued if each.request_id != request_id)
        if request_id == self._preparing:
            self._preparing = None
        mine = [engine_id for engine_id, name in self._computing.items() if name == request_id]
        for engine_id in mine:
            del self._computing[engine_id]
            self._engine.abort_request([engine_id], internal=True)
        self._preparer.release(request_id)

    def collect(self) -> Iterator[Metric]:
        """What they tell Prometheus."""
        labels = {"stage": _STAGE}
        yield counter(
            "omnirelay_early_prompt_tokens_total",
            "Tokens of the beginnings of prompts that were computed ahead of their requests.",
            [(labels, self._tokens)],
        )
        yield counter(
            "omnirelay_early_computed_tokens_total",
            "Those of them that were not found in the prefix cache.",
            [(labels, self._computed_tokens)],
        )
