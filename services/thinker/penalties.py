"""Presence and frequency penalty, which count the tokens of an answer over all its attempts.

vLLM's own count what this engine drew.  To it, the tokens of an earlier attempt are a part of the prompt.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from services.thinker.resume import prompt_length
from shared.vllm.sampling.arguments import arguments_of
from shared.vllm.transfer import to_device


@dataclass(slots=True)
class _Counts:
    """How often each token is in a request's answer."""

    presence: float
    frequency: float
    counts: Counter[int]
    answer: list[int]  # vLLM's own list, which only grows
    read: int = 0

    def penalties(self) -> tuple[list[int], list[float]]:
        """The tokens, and what is taken from the logit of each."""
        self.counts.update(self.answer[self.read :])
        self.read = len(self.answer)
        return list(self.counts), [self.presence + self.frequency * n for n in self.counts.values()]


class AnswerPenalties(LogitsProcessor):
    """Makes tokens of a request's answer less likely, by the penalties of its arguments.

    As in OpenAI's API: the presence penalty once, the frequency penalty for each occurrence.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, is_pin_memory
        self._device = device
        self._counts: dict[int, _Counts] = {}

    def is_argmax_invariant(self) -> bool:
        """The largest logit may become less than another one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they join, leave and move within the batch."""
        process_dict_updates(self._counts, batch_update, _counts_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Penalize float32 [requests, vocabulary] before temperature, in place."""
        rows: list[int] = []
        tokens: list[int] = []
        penalties: list[float] = []
        for row, counts in self._counts.items():
            those, theirs = counts.penalties()
            rows += [row] * len(those)
            tokens += those
            penalties += theirs
        if tokens:
            at = to_device(torch.tensor([rows, tokens]), self._device).unbind()
            logits[at] -= to_device(torch.tensor(penalties), self._device)
        return logits


def _counts_of(params: SamplingParams, prompt: list[int] | None, answer: list[int]) -> _Counts | None:
    arguments = arguments_of(params)
    if not (arguments.presence or arguments.frequency):
        return None
    replayed = prompt[prompt_length(prompt) :] if prompt else []
    return _Counts(arguments.presence, arguments.frequency, Counter(replayed), answer)
