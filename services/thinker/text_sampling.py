"""What the thinker's sampling has besides that of other stages, as vLLM's."""

from typing import Any, Final

from vllm.outputs import CompletionOutput
from vllm.sampling_params import StructuredOutputsParams

from omnirelay.events import TokenLogprobs
from shared.messages import TextSampling

MIN_LOGPROB: Final = -9999.0
"""JSON has no infinity; this is what OpenAI's API sends instead."""


def vllm_params(sampling: TextSampling) -> dict[str, Any]:
    """The parameters of vLLM's that only text has; the penalties are :mod:`services.thinker.penalties`'."""
    schema = sampling.json_schema
    return {
        "min_p": sampling.min_p,
        "logit_bias": sampling.logit_bias or None,
        "logprobs": sampling.logprobs,
        "structured_outputs": None if schema is None else StructuredOutputsParams(json=schema),
    }


def logprobs_of(completion: CompletionOutput, most: int) -> list[TokenLogprobs]:
    """The log probabilities of new tokens, with those of the ``most`` likeliest ones."""
    found = []
    for token_id, position in zip(completion.token_ids, completion.logprobs or (), strict=False):
        each = {token: max(logprob.logprob, MIN_LOGPROB) for token, logprob in position.items()}
        # The token itself comes first, whatever its rank.
        ranked = sorted((logprob.rank or 0, token) for token, logprob in position.items())
        top = [(token, each[token]) for rank, token in ranked if rank <= most]
        found.append(TokenLogprobs(each[token_id], top))
    return found
