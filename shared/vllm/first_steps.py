"""What an engine computes before its stage is ready, on a GPU.

The first steps there load libraries, compile kernels and take memory, for seconds.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import StageStartError
from shared.vllm.sampling.generation import finish_reason
from shared.vllm.scheduling import StageScheduler

_MOST_STEPS: Final = 1000
"""More than any of these requests takes: one that does not end fails the start."""


@contextmanager
def first_steps(engine: LLMEngine) -> Iterator[None]:
    """Let an engine compute, and forget all of it: counts, measured times, caches.

    Raises StageStartError if it failed, or something is left in work.
    """
    scheduler: StageScheduler = engine.engine_core.engine_core.scheduler
    logger, engine.logger_manager = engine.logger_manager, None
    try:
        yield
    except Exception as error:
        # Whatever it is, a request would meet it too.
        raise StageStartError(f"what is computed before the stage is ready failed: {error}") from error
    finally:
        engine.logger_manager = logger
    scheduler.forget_steps()
    engine.reset_encoder_cache()
    if scheduler.requests or not engine.reset_prefix_cache():
        raise StageStartError("something is left of what is computed before the stage is ready")


def run_requests(engine: LLMEngine) -> Iterable[RequestOutput]:
    """Step until all requests have ended; gives what came of each step, raises why one failed."""
    scheduler: StageScheduler = engine.engine_core.engine_core.scheduler
    for _ in range(_MOST_STEPS):
        # The worker must hear of those that have ended.
        if not scheduler.has_requests():
            return
        for output in engine.step():
            if isinstance(output, RequestOutput):
                if output.finished:
                    finish_reason(output.outputs[0])
                yield output
        for failure in scheduler.take_failures().values():
            raise failure
    raise StageStartError(f"a request has not ended after {_MOST_STEPS} steps")
