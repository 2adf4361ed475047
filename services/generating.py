"""What the services of the two stages that generate tokens have in common."""

from functools import partial
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.inputs import MultiModalInput, TokensInput
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from shared.messages import SpeechStart, StageEvent, StageLoad, ThinkRequest
from shared.playback import PlaybackClock
from shared.stage.service import StageService
from shared.tracing.stage import StageTraces
from shared.transport.routing import Outlet
from shared.vllm.model_time import watch_model
from shared.vllm.sampling.generation import submit
from shared.vllm.workers import Workers

M = TypeVar("M")


class GeneratingService(StageService[M]):
    """A service whose engine generates tokens.

    Args:
        engine: Its engine.
        gateway: Where events go.
        following: The next stage.
    """

    def __init__(self, engine: LLMEngine, gateway: Outlet[StageEvent], following: Outlet[Any]) -> None:
        self.traces = StageTraces(self.name)
        self.model_time = watch_model(engine)
        self._engine = engine
        self._scheduler: Any = engine.engine_core.engine_core.scheduler
        self._workers = Workers(engine)
        self._gateway, self._following = gateway, following
        self._steps = 0

    def take_turn(self) -> str | None:
        """Choose the suspect that the next step computes alone; None if no suspect can run."""
        turn: str | None = self._scheduler.take_turn()
        return turn

    def close(self) -> None:
        """End the processes of the engine."""
        self._workers.close()

    def _submit(
        self,
        message: ThinkRequest | SpeechStart,
        prompt: TokensInput | MultiModalInput,
        params: SamplingParams,
        priority: int,
        clock: PlaybackClock,
    ) -> str:
        """Give a request to the engine, which holds it while a receiver does not keep up."""
        engine_id = submit(self._engine, message.request_id, prompt, params, priority)
        self._scheduler.attach(engine_id, clock)
        receivers = (self._following, self._gateway)
        self._scheduler.follow(engine_id, *(partial(each.stalls, message.request_id) for each in receivers))
        if message.route is not None and self.name in message.route.alone:
            self._scheduler.suspect(engine_id, message.request_id)
        return engine_id

    def _compute(self) -> list[RequestOutput]:
        """Compute a step of the engine."""
        outputs = self._engine.step()
        self._steps += 1
        return [output for output in outputs if isinstance(output, RequestOutput)]

    def _engine_load(self, held_bytes: int) -> StageLoad:
        """What the engine holds now; outbox and refusals are the stage loop's to add."""
        running, waiting = self._scheduler.get_request_counts()
        return StageLoad(running=running, waiting=waiting, held_bytes=held_bytes, steps=self._steps)
