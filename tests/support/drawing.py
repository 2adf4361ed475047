"""A batch of requests that draw, as vLLM's sampler has one."""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from shared.messages import StageName
from shared.vllm.sampling.drawing import DrawProcessor, draw_here
from shared.vllm.sampling.seeds import go_on_drawing


def params_of(
    *, seed: int = 0, made: int = 0, stage: StageName = "thinker", **sampling: Any
) -> SamplingParams:
    """The parameters of a request."""
    asked = SamplingParams(**({"temperature": 1.0} | sampling))
    return go_on_drawing(draw_here(asked), stage, seed, made)


def processor() -> DrawProcessor:
    """One without requests."""
    return DrawProcessor(None, torch.device("cpu"), False)


class Batch:
    """Requests that draw together."""

    def __init__(self, requests: list[SamplingParams]) -> None:
        self.output: list[list[int]] = [[] for _ in requests]
        self._processor = processor()
        added = [(row, each, None, self.output[row]) for row, each in enumerate(requests)]
        self._processor.update_state(BatchUpdate(len(requests), removed=[], added=added, moved=[]))

    def draw(self, logits: torch.Tensor, keep: bool = True) -> list[int]:
        """The next token of each request; float32 ``[requests, vocabulary]``."""
        left = self._processor.apply(logits.clone())
        assert (torch.isfinite(left).sum(dim=1) == 1).all()
        tokens: list[int] = left.argmax(dim=1).tolist()
        if keep:
            for output, token in zip(self.output, tokens, strict=True):
                output.append(token)
        return tokens
