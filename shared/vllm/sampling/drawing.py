"""Seeded draws of a batch: temperature, top-k, top-p and noise of all requests at once, on any device alike.

vLLM's sampler sorts all logits of the batch as soon as one request has a top-p, on a CPU: for eight requests
8 ms a step with the talker's 8,448 codec ids and 200 ms with the thinker's 152,064 tokens, where finding the
40 largest takes 0.1 and 1 ms.  On a GPU it makes the noise of each seeded request by a kernel of its own.

To vLLM all requests are greedy: it would else draw once more, by a noise of its own for the whole vocabulary,
from the one token that is left.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from shared.vllm.sampling.arguments import Draws, arguments_of
from shared.vllm.sampling.seeds import GOLDEN, MIXING, mix, seed_of_draw
from shared.vllm.transfer import to_device

MAX_CANDIDATES: Final = 1024
"""Requests with a larger top-k are drawn apart from others, so that these need not wait."""
_EQUALS: Final = 32
"""Logits looked at beyond the k largest: those equal to the least one kept are kept too."""
_RAREST: Final = -18.0
"""Below the logarithm of 2^-24, by which the largest float32 under 1 differs from it."""


def draw_here(params: SamplingParams) -> SamplingParams:
    """Move the draws of a request from vLLM's sampler to :class:`DrawProcessor`.

    Args:
        params: Valid ones, changed in place; those of a greedy request stay as they are.
    """
    if params.temperature > 0:
        arguments_of(params).draws = Draws(params.temperature, params.top_k, params.top_p, params.min_p)
        params.temperature, params.top_k, params.top_p, params.min_p = 0.0, 0, 1.0, 0.0
    return params


@dataclass(slots=True, eq=False)
class _Request:
    """What decides about a request's next draw."""

    draws: Draws
    params: SamplingParams
    answer: list[int]  # vLLM's own list, which only grows

    @property
    def kind(self) -> int:
        """Requests of one kind are drawn together: 0 of the whole vocabulary, 1 of few tokens, 2 of many."""
        if not self.draws.top_k and self.draws.top_p >= 1:
            return 0
        return 1 if 0 < self.draws.top_k <= MAX_CANDIDATES else 2

    def seed(self) -> int:
        """Of the noise of the next draw; the seed of the draw itself decides a frame's further codes."""
        return mix(seed_of_draw(self.params, len(self.answer)))


class _Group:
    """Requests of one kind, by their rows of the batch."""

    def __init__(self, requests: dict[int, _Request], batch_size: int, device: torch.device) -> None:
        self.requests = list(requests.values())
        # All rows need not be picked, and so not copied.
        everybody = len(requests) == batch_size
        self._rows = slice(None) if everybody else _there(list(requests), torch.int64, device)
        draws = [each.draws for each in self.requests]
        self._temperature = _there([each.temperature for each in draws], torch.float32, device)[:, None]
        self._least: torch.Tensor | None = None
        if any(each.min_p for each in draws):
            least = [math.log(each.min_p) if each.min_p else -math.inf for each in draws]
            self._least = _there(least, torch.float32, device)[:, None]
        self._most = 0
        if self.requests[0].kind:
            # Without a top-k all tokens are candidates.
            top_k = [each.top_k or 2**31 for each in draws]
            self._most = max(top_k) + _EQUALS
            self._top_k = _there(top_k, torch.int64, device)[:, None]
            # The sum of all probabilities may be above 1.
            top_p = [each.top_p if each.top_p < 1 else 2.0 for each in draws]
            self._top_p = _there(top_p, torch.float32, device)[:, None]

    def draw(self, logits: torch.Tensor, seeds: torch.Tensor) -> None:
        """Leave each request the one token that it draws; float32 ``[batch, vocabulary]``, in place."""
        chosen = logits[self._rows]
        values, ids = self.candidates(chosen)
        tokens = (values + gumbel_noise(seeds, ids)).argmax(dim=-1, keepdim=True)
        if self._most:
            tokens = ids.gather(1, tokens)
        logits[self._rows] = chosen.fill_(-torch.inf).scatter_(1, tokens, 0.0)

    def candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logits, or all, by temperature; -inf where they are left out; and their tokens.

        ``logits``, float32 ``[requests, vocabulary]``, are changed.
        """
        if not self._most:
            values, ids = logits, torch.arange(logits.shape[1], device=logits.device)
            return self._likely(values.div_(self._temperature)), ids
        values, ids = logits.topk(min(self._most, logits.shape[1]), dim=-1)
        values = self._likely(values.div_(self._temperature))
        among = torch.arange(values.shape[1], device=logits.device) < self._top_k
        probabilities = values.masked_fill(~among, -torch.inf).softmax(dim=-1)
        # Summed from the least likely on, as vLLM does: nothing small is lost beside a sum near 1.
        rest = probabilities.flip(-1).cumsum(dim=-1).flip(-1)
        kept = among & (rest > 1 - self._top_p)
        # The likeliest is kept whatever rounding does to the sum of all.
        kept[:, 0].fill_(True)
        least = values.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True)
        return values.masked_fill_(values < least, -torch.inf), ids

    def _likely(self, values: torch.Tensor) -> torch.Tensor:
        """Leave out, in place, what is less likely than min-p asks for."""
        if self._least is None:
            return values
        return values.masked_fill_(values < values.amax(dim=-1, keepdim=True) + self._least, -torch.inf)


class DrawProcessor(LogitsProcessor):
    """Draws for each request that :func:`draw_here` was called for, and masks all tokens but the drawn one.

    A request's candidates are its k largest logits; of these it keeps the fewest that together have at
    least p of the candidates' probability (Holtzman et al., "The Curious Case of Neural Text
    Degeneration", 2020), without those less likely than min-p's share of the likeliest one.  Of them it takes
    the largest after noise of Gumbel's distribution was added, which is a function of the draw's seed and the
    token's id: neither the batch nor the device decides.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, is_pin_memory
        self._device = device
        self._requests: dict[int, _Request] = {}
        self._groups: list[_Group] = []

    def is_argmax_invariant(self) -> bool:
        """To vLLM all requests are greedy: see the module."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they join, leave and move within the batch."""
        process_dict_updates(self._requests, batch_update, _request_of)
        if batch_update is not None:
            self._groups = list(self._grouped(batch_update.batch_size))

    def _grouped(self, batch_size: int) -> Iterator[_Group]:
        rows = sorted(self._requests)
        for kind in sorted({each.kind for each in self._requests.values()}):
            ours = {row: self._requests[row] for row in rows if self._requests[row].kind == kind}
            yield _Group(ours, batch_size, self._device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw in place.

        Args:
            logits: After penalties, float32 [requests, vocabulary].
        """
        if not self._groups:
            return logits
        drawn = [_signed(request.seed()) for group in self._groups for request in group.requests]
        seeds = _there(drawn, torch.int64, self._device)
        sizes = [len(group.requests) for group in self._groups]
        for group, theirs in zip(self._groups, seeds.split(sizes), strict=True):
            group.draw(logits, theirs)
        return logits


def gumbel_noise(seeds: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Numbers of the standard Gumbel distribution, float32 ``[n, m]``, by splitmix64 of seed and id.

    Args:
        seeds: int64 ``[n]``, all bits random.
        ids: int64 ``[n, m]`` or ``[m]``.
    """
    # In place: a vocabulary of 64-bit words for each request is too much memory to write often.
    mixed = ids * _signed(GOLDEN) + (seeds[:, None] + _signed(GOLDEN))
    for shift, factor in MIXING:
        mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(_signed(factor))
    # 63 bits, of which float32 keeps the first 24 that are not 0: rare tokens need the smallest numbers.
    uniform = _shifted(mixed.bitwise_xor_(_shifted(mixed, 31)), 1).to(torch.float32).mul_(-(2.0**-63))
    # No number is infinite: a token that alone may be drawn, as a grammar has it, would not be.
    return uniform.log1p_().clamp_(_RAREST, -1e-30).neg_().log_().neg_()


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right; int64's own shift would repeat the sign."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of a number of 64."""
    return word - 2**64 if word >= 2**63 else word


def _there(values: list[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=dtype), device)


def _request_of(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Request | None:
    del prompt
    draws = arguments_of(params).draws
    return draws and _Request(draws, params, output)
