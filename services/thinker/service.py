"""The thinker's work: prompts in, text tokens to the gateway, conditioning rows to the talker."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from prometheus_client.core import Metric
from vllm import SamplingParams
from vllm.inputs import MultiModalInput, TokensInput, tokens_input
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import (
    InvalidRequestError,
    OmniRelayError,
    PromptTooLongError,
    RepeatedMessageError,
    UnknownSpeakerError,
)
from services.thinker.engine import build_thinker, read_embeddings
from services.thinker.family import ThinkerFamily, TrackWriter
from services.thinker.media.preparer import MediaPreparer
from services.thinker.media.rules import check_placeholders
from services.thinker.resume import Progress
from services.thinker.rows import RowSender
from services.thinker.scheduler import SPEECH, ThinkerScheduler
from services.thinker.worker import PROMPT_TOKENS
from shared.config import MediaConfig, ThinkerConfig
from shared.messages import (
    FinishReason,
    PromptUsage,
    Sampling,
    SpeechStart,
    StageEvent,
    StageLimits,
    StageLoad,
    StageName,
    TalkerInput,
    TextDelta,
    ThinkRequest,
)
from shared.messages.bounds import DEFAULT_MAX_PAYLOAD_BYTES
from shared.metrics import counter
from shared.stage.service import Failures
from shared.tracing.stage import StageTraces
from shared.transport.queues import PushQueue
from shared.transport.routing import Outlet
from shared.vllm.model_time import watch_model
from shared.vllm.sampling.generation import (
    begin_of_decoding,
    engine_load,
    finish_reason,
    sampling_params,
    submit,
)


@dataclass
class _Thought:
    """A request in the engine."""

    request_id: str
    engine_id: str
    prompt_tokens: int
    track: TrackWriter | None
    progress: Progress
    seq: int = 0


class ThinkerService:
    """Answers prompts; see :class:`shared.stage.service.StageService` for the protocol.

    Args:
        family: The checkpoint's.
        model: Directory of the checkpoint.
        config: The stage's configuration.
        gateway: Where text goes.
        talker: Where rows go.
        media: What sounds, pictures and videos a request may bring.
        max_payload_bytes: Largest tensor that the talker takes.
    """

    name: StageName = "thinker"

    def __init__(
        self,
        family: ThinkerFamily,
        model: Path,
        config: ThinkerConfig,
        gateway: PushQueue[StageEvent],
        talker: Outlet[TalkerInput],
        media: MediaConfig | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        media = media or MediaConfig()
        self.traces = StageTraces(self.name)
        self._gateway = gateway
        self._talker = talker
        self._family = family
        self._engine: LLMEngine
        self._engine, self._media = build_thinker(family, model, config, media)
        self.model_time = watch_model(self._engine)
        self._scheduler: ThinkerScheduler = self._engine.engine_core.engine_core.scheduler
        self._rows = RowSender(self._engine, self._scheduler, talker, max_payload_bytes)
        self._embeddings = read_embeddings(family, self._engine, model)
        self._end_tokens = family.end_tokens(self._engine.model_config.hf_config)
        self._preparer = MediaPreparer(self._media, media, self._engine.model_config.max_model_len)
        self.wake_fd: int | None = self._preparer.wake_fd
        self._preparing: dict[str, ThinkRequest] = {}
        self._thoughts: dict[str, _Thought] = {}
        self._by_engine_id: dict[str, _Thought] = {}
        self._steps = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self.limits = StageLimits(
            max_positions=self._engine.model_config.max_model_len, speakers=sorted(self._embeddings.voices)
        )

    @property
    def ready(self) -> bool:
        """A step would do something."""
        return self._scheduler.has_ready or self._preparer.has_outcomes

    def accept(self, message: ThinkRequest) -> None:
        """Take a prompt.

        Raises:
            RepeatedMessageError: A request of that name is in work.
            UnknownSpeakerError: The checkpoint has no such voice.
            PromptTooLongError: The prompt leaves no room for an answer.
            InvalidRequestError: A token has no embedding, vLLM refuses a sampling parameter, the media are
                not those that the prompt has places for, or no attempt can have given what it resumes from.
        """
        if self.holds(message.request_id):
            raise RepeatedMessageError(f"request {message.request_id} is in work already")
        self.traces.begin(message.request_id, message.traceparent, "media" if message.media else "queue")
        self._check_length(len(message.prompt_token_ids))
        vocabulary = self._engine.model_config.get_vocab_size()
        # vLLM checks this only where it makes the prompt itself; here the engine would die of it.
        if (largest := max(message.prompt_token_ids)) >= vocabulary:
            raise InvalidRequestError(
                f"token {largest} of the prompt lies outside the vocabulary of {vocabulary}"
            )
        self._voice_row(message)
        progress = Progress.of(message)
        most = min(message.sampling.max_tokens, self.limits.max_positions - len(message.prompt_token_ids))
        progress.check(message, most, self._end_tokens, vocabulary)
        if message.media:
            check_placeholders(message.prompt_token_ids, message.media, self._media.placeholders)
        if not progress.needs_engine:
            self._announce(message, len(message.prompt_token_ids))
            if message.request_id in self.traces:
                self.traces.completed(message.request_id, {})
        elif message.media:
            self._preparing[message.request_id] = message
            self._preparer.submit(message)
        else:
            self._begin(message, tokens_input(message.prompt_token_ids))

    def abort(self, request_id: str) -> None:
        """Drop a request, if it is here."""
        if self._preparing.pop(request_id, None) is not None:
            self._preparer.release(request_id)
        thought = self._forget(request_id)
        if thought is not None:
            self._engine.abort_request([thought.engine_id], internal=True)

    def step(self) -> dict[str, OmniRelayError]:
        """Compute one step and send what came out of it; gives the requests that failed, with reasons."""
        failures = Failures()
        self._begin_prepared(failures)
        if not self._scheduler.has_requests():
            return failures
        outputs = self._engine.step()
        self._steps += 1
        self._rows.send(self._track_of, failures)
        for output in outputs:
            thought = self._thoughts.get(output.request_id)
            if thought is None or thought.request_id in failures or not isinstance(output, RequestOutput):
                continue
            with failures.only(thought.request_id):
                self._send_text(thought, output)
        for engine_id, reason in self._scheduler.take_failures().items():
            if engine_id in self._by_engine_id:
                failures[self._by_engine_id[engine_id].request_id] = reason
        return failures

    def load(self) -> StageLoad:
        """What the stage holds now."""
        load = engine_load(self._scheduler, self._steps, self._preparer.held_bytes)
        return msgspec.structs.replace(load, waiting=load.waiting + len(self._preparing))

    def holds(self, request_id: str) -> bool:
        """Whether a request is in work here."""
        return request_id in self._thoughts or request_id in self._preparing

    def active_requests(self) -> list[str]:
        """The requests in work."""
        return [*self._preparing, *self._thoughts]

    def close(self) -> None:
        """End the processes that decode media."""
        self._preparer.close()

    def collect(self) -> Iterator[Metric]:
        """What the thinker tells Prometheus besides what all stages do."""
        labels = {"stage": self.name}
        yield from self._scheduler.collect(self.name)
        yield counter(
            "omnirelay_prefix_cache_queried_tokens_total",
            "Tokens of the prompts whose answers began: what the prefix cache could have held.",
            [(labels, self._prompt_tokens)],
        )
        yield counter(
            "omnirelay_prefix_cache_hit_tokens_total",
            "Those of them that were found in the prefix cache and not computed.",
            [(labels, self._cached_tokens)],
        )
        yield counter(
            "omnirelay_conditioning_rows_sent_total",
            "Conditioning rows sent to the talker.",
            [(labels, self._rows.sent)],
        )
        yield from self._preparer.metrics.collect()

    def _begin_prepared(self, failures: Failures) -> None:
        """Give the engine the requests whose media are ready."""
        for outcome in self._preparer.take():
            with failures.only(outcome.request.request_id):
                self._begin(outcome.request, outcome.prompt)

    def _begin(self, message: ThinkRequest, prompt: TokensInput | MultiModalInput) -> None:
        """Give a request to the engine, and tell the talker of it."""
        length = len(prompt["prompt_token_ids"])
        self._check_length(length)
        voice = self._voice_row(message)
        progress = Progress.of(message)
        track = None
        if voice is not None and progress.needs_rows:
            track = self._family.track(message.request_id, length, voice, self._embeddings.closing)
        params = self._params(message, progress, length)
        prompt = progress.behind(prompt)
        engine_id = submit(self._engine, message.request_id, prompt, params, message.priority)
        thought = _Thought(message.request_id, engine_id, length, track, progress)
        self._scheduler.follow(engine_id, partial(self._talker.stalls, message.request_id))
        self._thoughts[message.request_id] = thought
        self._by_engine_id[engine_id] = thought
        if self._preparing.pop(message.request_id, None) is not None:
            self.traces.enter(message.request_id, "queue")
        self._announce(message, length)

    def _announce(self, message: ThinkRequest, length: int) -> None:
        """Tell the talker of a request, if it is to be spoken."""
        if message.speech is not None:
            self._talker.put(
                SpeechStart(
                    request_id=message.request_id,
                    prompt_tokens=length,
                    priority=message.priority,
                    speech=message.speech,
                    traceparent=message.traceparent,
                    resume=message.resume.speech if message.resume else None,
                    route=message.route,
                )
            )

    def _check_length(self, length: int) -> None:
        if length >= self.limits.max_positions:
            raise PromptTooLongError(
                f"the prompt has {length} tokens, the thinker takes at most {self.limits.max_positions - 1}"
            )

    def _voice_row(self, message: ThinkRequest) -> torch.Tensor | None:
        """The row of the voice's start token; none without speech."""
        if message.speech is None:
            return None
        voice = self._embeddings.voices.get(message.speech.speaker)
        if voice is None:
            raise UnknownSpeakerError(
                f"no voice {message.speech.speaker!r}, this checkpoint has {', '.join(self.limits.speakers)}"
            )
        return voice

    def _params(self, message: ThinkRequest, progress: Progress, length: int) -> SamplingParams:
        room = self.limits.max_positions - length
        if len(progress.replayed_tokens) >= room:
            raise InvalidRequestError(
                f"resume.text_token_ids: {len(progress.text)} tokens, but only {room} fit behind the prompt"
            )
        sampling, made = message.sampling, len(progress.text)
        if progress.finish_reason is not None:
            # vLLM computes no prompt without drawing a token behind it; this one is thrown away.
            sampling, made = Sampling(max_tokens=1), 0
        return sampling_params(
            sampling,
            stage=self.name,
            seed=message.seed,
            stop_token_ids=self._end_tokens,
            room=room,
            made=made,
            extra_args={SPEECH: progress.needs_rows, PROMPT_TOKENS: length},
        )

    def _track_of(self, engine_id: str) -> TrackWriter | None:
        thought = self._by_engine_id.get(engine_id)
        return thought.track if thought is not None else None

    def _send_text(self, thought: _Thought, output: RequestOutput) -> None:
        completion = output.outputs[0]
        reason = finish_reason(completion) if output.finished else None
        if thought.progress.finish_reason is not None:
            self._complete(thought, output, thought.progress.finish_reason)
            return
        usage = None
        if thought.seq == 0:
            usage = self._usage(thought, output)
            begin_of_decoding(self.traces, thought.request_id, output)
        self._gateway.put(
            TextDelta(
                request_id=thought.request_id,
                seq=thought.seq,
                token_ids=list(completion.token_ids),
                finish_reason=reason,
                prompt=usage,
            )
        )
        thought.seq += 1
        if reason is not None:
            self._complete(thought, output, reason)

    def _complete(self, thought: _Thought, output: RequestOutput, reason: FinishReason) -> None:
        """Close the rows of a request, and forget it."""
        if thought.track is not None:
            self._rows.close(thought.track)
        self._forget(thought.request_id)
        if thought.request_id not in self.traces:
            return
        told = {
            "gen_ai.usage.input_tokens": thought.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens or 0,
            "gen_ai.response.finish_reasons": [reason],
        }
        self.traces.completed(thought.request_id, told)

    def _usage(self, thought: _Thought, output: RequestOutput) -> PromptUsage:
        cached = min(output.num_cached_tokens or 0, thought.prompt_tokens)
        self._prompt_tokens += thought.prompt_tokens
        self._cached_tokens += cached
        return PromptUsage(tokens=thought.prompt_tokens, cached_tokens=cached)

    def _forget(self, request_id: str) -> _Thought | None:
        thought = self._thoughts.pop(request_id, None)
        if thought is not None:
            self._preparer.release(request_id)
            del self._by_engine_id[thought.engine_id]
        return thought
