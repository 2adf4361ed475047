"""What goes to the gateway: the text of each reply as it is generated."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import Metric
from vllm.outputs import CompletionOutput, RequestOutput

from omnirelay.events import TokenLogprobs
from services.thinker.resume import Progress
from services.thinker.track import TrackWriter
from shared.messages import FinishReason, PromptUsage, StageEvent, TextDelta, ThinkRequest
from shared.metrics import counter
from shared.playback import PlaybackClock
from shared.tracing.stage import StageTraces
from shared.transport.routing import Outlet
from shared.vllm.sampling.generation import begin_of_decoding, finish_reason

MIN_LOGPROB: Final = -9999.0
"""JSON has no infinity; this is what OpenAI's API sends instead."""
READ_TOKENS_PER_S: Final = 20
"""Nobody reads faster.  A reply that is not spoken waits only while it is further ahead than that."""


@dataclass
class Generation:
    """A request in the engine; ``seq`` is the number of its next text delta."""

    request: ThinkRequest
    engine_id: str
    prompt_tokens: int
    track: TrackWriter | None
    progress: Progress
    clock: PlaybackClock
    seq: int = 0

    @property
    def request_id(self) -> str:
        """The gateway's name for it."""
        return self.request.request_id

    @property
    def early(self) -> bool:
        """It is computed ahead of its request."""
        return self.request.early is not None


class TextSender:
    """Sends text deltas, advances playback clocks by text tokens a second, and counts prompts' tokens."""

    def __init__(self, gateway: Outlet[StageEvent], traces: StageTraces, rows_per_s: float) -> None:
        self._gateway = gateway
        self._traces = traces
        self._rows_per_s = rows_per_s
        # Tokens of prompts and the cached ones of them, of requests and of prompts computed ahead of these.
        self._prompts = {False: [0, 0], True: [0, 0]}

    def send(self, generation: Generation, output: RequestOutput) -> FinishReason | None:
        """Send what was generated; gives why the text has ended, once it has."""
        completion = output.outputs[0]
        rate = self._rows_per_s if generation.track is not None else READ_TOKENS_PER_S
        generation.clock.made(len(completion.token_ids) / rate)
        if generation.progress.finish_reason is not None and not generation.early:
            # The whole text was sent before the resume.
            return generation.progress.finish_reason
        if generation.early and not output.finished:
            return None
        reason = finish_reason(completion) if output.finished else None
        usage = None
        if generation.seq == 0:
            cached = min(output.num_cached_tokens or 0, generation.prompt_tokens)
            counts = self._prompts[generation.early]
            counts[0] += generation.prompt_tokens
            counts[1] += cached
            usage = PromptUsage(tokens=generation.prompt_tokens, cached_tokens=cached)
            begin_of_decoding(self._traces, generation.request_id, output)
        self._gateway.put(
            TextDelta(
                request_id=generation.request_id,
                seq=generation.seq,
                token_ids=[] if generation.early else list(completion.token_ids),
                finish_reason=reason,
                prompt=usage,
                logprobs=_logprobs_of(completion, generation.request.sampling.logprobs or 0),
            )
        )
        generation.seq += 1
        return reason

    def collect(self) -> Iterator[Metric]:
        """The counters of prompts' tokens."""
        labels = {"stage": "thinker"}
        tokens, cached = self._prompts[False]
        early, found = self._prompts[True]
        for name, description, value in (
            (
                "omnirelay_prefix_cache_queried_tokens_total",
                "Tokens of the prompts whose answers began.",
                tokens,
            ),
            ("omnirelay_prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.", cached),
            (
                "omnirelay_early_prompt_tokens_total",
                "Prompt tokens computed before their requests came.",
                early,
            ),
            (
                "omnirelay_early_computed_tokens_total",
                "Early prompt tokens not found in the prefix cache.",
                early - found,
            ),
        ):
            yield counter(name, description, [(labels, value)])


def _logprobs_of(completion: CompletionOutput, most: int) -> list[TokenLogprobs]:
    """The log probabilities of new tokens, with those of the ``most`` likeliest ones."""
    found = []
    for token_id, position in zip(completion.token_ids, completion.logprobs or (), strict=False):
        each = {token: max(logprob.logprob, MIN_LOGPROB) for token, logprob in position.items()}
        # The token itself comes first, whatever its rank.
        ranked = sorted((logprob.rank or 0, token) for token, logprob in position.items())
        top = [(token, each[token]) for rank, token in ranked if rank <= most]
        found.append(TokenLogprobs(each[token_id], top))
    return found
