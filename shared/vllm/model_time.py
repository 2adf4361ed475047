"""How long the model itself computes, apart from all that vLLM does around it."""

from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn
    from vllm.v1.engine.llm_engine import LLMEngine

_PARTS: Final = ("audio_tower", "visual", "code_predictor")
"""What is called of a model besides its forward pass and its logits: encoders of media, further codes."""


class ModelTime:
    """A clock that runs while a module computes.

    On a GPU it runs while the work is handed over, for nobody waits there for its end.

    Attributes:
        seconds: How long it has run.
    """

    __slots__ = ("_started", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def watch(self, module: "nn.Module") -> None:
        """Let the clock run during each call of a module; no two of them may run within each other."""
        module.register_forward_pre_hook(self._start)
        module.register_forward_hook(self._stop, always_call=True)

    def _start(self, *_: Any) -> None:
        self._started = perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds += perf_counter() - self._started


def watch_model(engine: "LLMEngine") -> ModelTime:
    """Begin to measure an engine's model: forward passes, logits, encoders of media, further
    codes, token2wav's solver.

    With ``tensor_parallel_size`` above 1 the model runs in other processes, and the clock stands still.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor  # noqa: PLC0415 - the clock needs none

    clock = ModelTime()
    worker = getattr(engine.model_executor, "driver_worker", None)
    if worker is not None:
        runner = worker.worker.model_runner
        model = runner.get_model()
        parts = [getattr(model, name) for name in _PARTS if hasattr(model, name)]
        parts += [module for module in model.modules() if isinstance(module, LogitsProcessor)]
        for module in [model.pooler] if runner.is_pooling_model else [model, *parts]:
            clock.watch(module)
    return clock
