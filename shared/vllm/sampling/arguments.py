"""What a service tells its scheduler, worker and logits processors of a request, beside vLLM's parameters."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from vllm import SamplingParams

_KEY: Final = "omnirelay"


class Draws(NamedTuple):
    """How a request draws."""

    temperature: float
    top_k: int  # 0 for all
    top_p: float
    min_p: float


@dataclass(eq=False, slots=True)
class RequestArguments:
    """Of one request; each field's owner says what it does."""

    wants_rows: bool = False  # Its conditioning rows are sent
    stream: int = 0  # Of seeded draws
    made: int = 0  # Draws of earlier attempts
    draws: Draws | None = None  # Which vLLM's sampler does not make; None of greedy requests
    repetition: float = 1.0  # The penalty that vLLM's sampler does not have
    seen: Any = None  # Tokens that the penalty is for, kept while the request is out of the batch
    presence: float = 0.0  # Penalties for tokens of the answer, over all attempts
    frequency: float = 0.0


def arguments_of(params: SamplingParams | None) -> RequestArguments:
    """A request's arguments, which vLLM carries along; those by default where none were given."""
    if params is None:
        return RequestArguments()
    if params.extra_args is None:
        params.extra_args = {}
    arguments: RequestArguments = params.extra_args.setdefault(_KEY, RequestArguments())
    return arguments
