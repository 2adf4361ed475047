"""How long the model itself computes, apart from all that vLLM does around it."""

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_PARTS: Final = ("compute_logits", "embed_multimodal")
"""What vLLM asks of a model that generates, besides its forward pass."""


class ModelTime:
    """A clock that runs while the model computes.

    On a GPU it runs while the work is handed over, for nobody waits there for its end.

    Attributes:
        seconds: How long it has run.
    """

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, method: str) -> None:
        """Let the clock run during each call of an object's method."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            started = perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds += perf_counter() - started

        setattr(owner, method, timed)


def watch_model(engine: "LLMEngine") -> ModelTime:
    """Begin to measure an engine's model: forward passes, logits, encoders of media, token2wav's solver.

    With ``tensor_parallel_size`` above 1 the model runs in other processes, and the clock stands still.
    """
    clock = ModelTime()
    worker = getattr(engine.model_executor, "driver_worker", None)
    if worker is not None:
        runner = worker.worker.model_runner
        model = runner.get_model()
        clock.watch(runner, "_model_forward")
        for part in _PARTS:
            if hasattr(model, part):
                clock.watch(model, part)
        if runner.is_pooling_model:
            clock.watch(model.pooler, "forward")
    return clock
