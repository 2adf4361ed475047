"""The worker of the two stages that draw tokens: vLLM's of this platform, with seeds that hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from shared.engine.platform import worker_base

_Worker: Any = worker_base()


class StageWorker(_Worker):
    """vLLM's worker, in which a token that is thrown away costs a request nothing of its random numbers.

    Where a prompt is computed in pieces, vLLM draws a token after each, throws it away and turns the
    request's generator back.  A generator of the CPU cannot be turned back, and the step dies of it; so
    here such tokens are drawn without it.
    """

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Draw the tokens of the step that was just computed."""
        with _spared_generators(self.model_runner):
            return super().sample_tokens(grammar_output)


@contextmanager
def _spared_generators(runner: Any) -> Iterator[None]:
    """Keep the generators of requests whose draw is thrown away out of the sampler's sight."""
    batch = runner.input_batch
    discarded = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
    spared = {index: batch.generators.pop(index) for index in discarded if index in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(spared)
