"""What the two autoregressive stages share in driving their vLLM engine."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import MultiModalInput, TokensInput
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import InvalidRequestError, PromptTooLongError, StageFailedError
from shared.messages import FinishReason, Sampling, StageName
from shared.tracing.stage import StageTraces
from shared.vllm.sampling.drawing import draw_here
from shared.vllm.sampling.repetition import penalize_here
from shared.vllm.sampling.seeds import go_on_drawing

REFUSALS: Final = (ValueError, VLLMClientError)
"""What vLLM raises for a request that is wrong in itself."""


def sampling_params(
    sampling: Sampling,
    *,
    stage: StageName,
    seed: int,
    stop_token_ids: list[int],
    room: int,
    made: int = 0,
    further: Mapping[str, Any] = MappingProxyType({}),
) -> SamplingParams:
    """A message's sampling as vLLM's, with the tokens delivered as they come.

    Args:
        stage: Who draws; the stages of a request draw independently.
        stop_token_ids: A sampled one ends the request, and is delivered.
        room: Most tokens that fit behind the prompt.
        made: Tokens that an earlier attempt drew; fewer than may be drawn in all.
        further: Parameters of vLLM's that only this stage has.

    Raises:
        PromptTooLongError: There is no room for a single token.
        InvalidRequestError: A value is out of vLLM's range.
    """
    if room < 1:
        raise PromptTooLongError("the prompt leaves no room for an answer")
    most = min(sampling.max_tokens, room)
    try:
        params = SamplingParams(
            max_tokens=most - made,
            min_tokens=max(0, min(sampling.min_tokens, most) - made),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
            stop_token_ids=stop_token_ids,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **further,
        )
    except REFUSALS as error:
        raise InvalidRequestError(f"sampling: {error}") from error
    return go_on_drawing(penalize_here(draw_here(params)), stage, seed, made)


def submit(
    engine: LLMEngine,
    request_id: str,
    prompt: TokensInput | MultiModalInput,
    params: SamplingParams,
    priority: int,
) -> str:
    """Give a request to the engine.

    Returns:
        The engine's own name for it.

    Raises:
        InvalidRequestError: vLLM refuses it; the message is vLLM's.
    """
    try:
        return engine.add_request(request_id, prompt, params, priority=priority)
    except Exception as error:
        # It may be noted in a part of the engine.
        engine.abort_request([request_id])
        if isinstance(error, REFUSALS):
            raise InvalidRequestError(str(error)) from error
        raise


def finish_reason(completion: CompletionOutput) -> FinishReason:
    """Why a finished request ended; raises :class:`StageFailedError` if it did not end by itself."""
    if completion.finish_reason in ("stop", "length"):
        return completion.finish_reason
    raise StageFailedError(f"the engine ended the request: {completion.finish_reason}")


def begin_of_decoding(traces: StageTraces, request_id: str, output: RequestOutput) -> None:
    """Note that a request's first tokens came, and when the engine had begun with it.

    vLLM tells the latter if it keeps metrics (``stages.STAGE.http``); else prefill counts as waiting for it.
    """
    if output.metrics is not None and output.metrics.scheduled_ts:
        traces.enter(request_id, "prefill", output.metrics.scheduled_ts)
    traces.enter(request_id, "decode")
