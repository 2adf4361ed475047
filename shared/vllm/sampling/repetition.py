"""The repetition penalty that looks at the tokens seen, not at the vocabulary.

vLLM's sampler makes tables of the whole vocabulary in each step, from all tokens drawn so far: with the
talker's 8,448 codec ids 0.6 ms a step for eight requests and more the longer their answers are, and with
the thinker's 152,064 tokens many times that.  Here what was seen is kept from step to step.
"""

from array import array
from typing import Any, Final

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from shared.vllm.sampling.arguments import arguments_of
from shared.vllm.transfer import to_device

_ROOM: Final = 256
"""Tokens per request that may come before all are collected anew."""


def penalize_here(params: SamplingParams) -> SamplingParams:
    """Move a request's repetition penalty from vLLM's sampler to :class:`RepetitionProcessor`.

    Args:
        params: Valid ones, changed in place; without a penalty they stay as they are.
    """
    if params.repetition_penalty != 1:
        arguments_of(params).repetition = params.repetition_penalty
        params.repetition_penalty = 1.0
    return params


class _Seen:
    """The tokens of a request's prompt and answer, each once."""

    __slots__ = ("_known", "_read", "answer", "penalty", "tokens")

    def __init__(self, penalty: float, prompt: list[int], answer: list[int]) -> None:
        self.penalty = penalty
        self.tokens = array("q", dict.fromkeys(prompt))
        # vLLM's own list, which only grows: nothing is drawn that is taken back later.
        self.answer = answer
        self._known = set(self.tokens)
        self._read = 0

    def read(self) -> list[int]:
        """Read on in the answer; gives tokens that had not been seen."""
        fresh = [token for token in dict.fromkeys(self.answer[self._read :]) if token not in self._known]
        self._known.update(fresh)
        self.tokens.extend(fresh)
        self._read = len(self.answer)
        return fresh


class RepetitionProcessor(LogitsProcessor):
    """Makes tokens of a request's prompt and answer less likely, where :func:`penalize_here` was called.

    A positive logit of such a token is divided by the penalty, a negative one multiplied (Keskar et al.,
    "CTRL: A Conditional Transformer Language Model for Controllable Generation", 2019; reference:
    transformers' ``RepetitionPenaltyLogitsProcessor``).
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, is_pin_memory
        self._device = device
        self._seen: dict[int, _Seen] = {}
        # Of each token seen its row of the batch and its id; of each row its penalty.
        self._places = torch.empty(2, 0, dtype=torch.int64, device=device)
        self._count = 0
        self._penalties = torch.empty(0, dtype=torch.float32, device=device)

    def is_argmax_invariant(self) -> bool:
        """The largest logit may become less than another one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they join, leave and move within the batch, and read what was drawn last."""
        changed = process_dict_updates(self._seen, batch_update, _seen_of)
        fresh = [(row, token) for row, seen in self._seen.items() for token in seen.read()]
        if changed or self._count + len(fresh) > self._places.shape[1]:
            self._collect()
        elif fresh:
            self._append(torch.tensor(fresh).T)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Penalize in place.

        Args:
            logits: Before temperature, float32 [requests, vocabulary].
        """
        if self._seen:
            rows, tokens = self._places[:, : self._count]
            values, penalties = logits[rows, tokens], self._penalties[rows]
            logits[rows, tokens] = torch.where(values > 0, values / penalties, values * penalties)
        return logits

    def _collect(self) -> None:
        """Write down everything that was seen, with room for what comes."""
        self._count = 0
        if not self._seen:
            return
        counts = torch.tensor([len(seen.tokens) for seen in self._seen.values()])
        rows = torch.tensor(list(self._seen)).repeat_interleave(counts)
        tokens = torch.from_numpy(np.concatenate([seen.tokens for seen in self._seen.values()]))
        size = len(tokens) + _ROOM * len(self._seen)
        self._places = torch.empty(2, size, dtype=torch.int64, device=self._device)
        self._append(torch.stack([rows, tokens]))
        penalties = torch.ones(1 + max(self._seen), dtype=torch.float32)
        for row, seen in self._seen.items():
            penalties[row] = seen.penalty
        self._penalties = to_device(penalties, self._device)

    def _append(self, places: torch.Tensor) -> None:
        end = self._count + places.shape[1]
        self._places[:, self._count : end] = to_device(places, self._device)
        self._count = end


def _seen_of(params: SamplingParams, prompt: list[int] | None, answer: list[int]) -> _Seen | None:
    """What was seen of a request that joins the batch.

    A request for which a step has nothing to do leaves the batch for as long; so it is kept where the
    request is.
    """
    arguments = arguments_of(params)
    if arguments.repetition == 1:
        return None
    seen: _Seen | None = arguments.seen
    if seen is None or seen.answer is not answer:
        seen = arguments.seen = _Seen(arguments.repetition, prompt or [], answer)
    return seen
