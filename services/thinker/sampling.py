"""How the thinker's tokens are drawn, in vLLM's terms."""

from vllm import SamplingParams

from shared.messages import TextSampling
from shared.vllm.sampling.arguments import arguments_of
from shared.vllm.sampling.generation import sampling_params


def text_params(
    sampling: TextSampling, *, seed: int, end_tokens: list[int], room: int, made: int, wants_rows: bool
) -> SamplingParams:
    """A request's parameters.

    Takes, and raises, as :func:`sampling_params`; ``wants_rows`` if its conditioning rows are sent.
    """
    params = sampling_params(
        sampling,
        stage="thinker",
        seed=seed,
        stop_token_ids=end_tokens,
        room=room,
        made=made,
        further={
            "min_p": sampling.min_p,
            "logit_bias": sampling.logit_bias or None,
            "logprobs": sampling.logprobs,
        },
    )
    arguments = arguments_of(params)
    arguments.wants_rows = wants_rows
    arguments.presence, arguments.frequency = sampling.presence_penalty, sampling.frequency_penalty
    return params
