"""The thinker's work: prompts in, text tokens to the gateway, conditioning rows to the talker."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch
from prometheus_client.core import Metric
from vllm import SamplingParams
from vllm.inputs import MultiModalInput, TokensInput, tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import StructuredOutputsParams
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
from services.thinker.penalties import answer_penalties
from services.thinker.prefills import Prefills
from services.thinker.resume import Progress
from services.thinker.rows import RowSender
from services.thinker.scheduler import PROMPT_TOKENS, SPEECH, ThinkerScheduler
from services.thinker.text_sender import Generation, TextSender
from shared.config import MediaConfig, ThinkerConfig
from shared.messages import (
    FinishReason,
    PrefillRequest,
    SpeechStart,
    StageEvent,
    StageLimits,
    StageLoad,
    StageName,
    TalkerInput,
    TextSampling,
    ThinkerInput,
    ThinkRequest,
)
from shared.messages.bounds import DEFAULT_MAX_PAYLOAD_BYTES
from shared.metrics import counter
from shared.stage.playback import PlaybackClock
from shared.stage.service import Failures
from shared.tracing.stage import StageTraces
from shared.transport.routing import Outlet
from shared.vllm.model_time import watch_model
from shared.vllm.sampling.generation import engine_load, sampling_params, submit
from shared.vllm.workers import Workers


class ThinkerService:
    """Answers prompts; see :class:`shared.stage.service.StageService` for the protocol."""

    name: StageName = "thinker"
    wake_at: float = math.inf

    def __init__(
        self,
        family: ThinkerFamily,
        model: Path,
        config: ThinkerConfig,
        gateway: Outlet[StageEvent],
        talker: Outlet[TalkerInput],
        media: MediaConfig | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        media = media or MediaConfig()
        self.traces = StageTraces(self.name)
        self._talker = talker
        self._gateway = gateway
        self._family = family
        self._engine: LLMEngine
        self._engine, self._media = build_thinker(family, model, config, media)
        self.model_time = watch_model(self._engine)
        self._workers = Workers(self._engine)
        self._scheduler: ThinkerScheduler = self._engine.engine_core.engine_core.scheduler
        self._rows = RowSender(self._engine, self._scheduler, talker, max_payload_bytes)
        self._embeddings = read_embeddings(family, self._engine, model)
        self._end_tokens = family.end_tokens(self._engine.model_config.hf_config)
        self._preparer = MediaPreparer(self._media, media, self._engine.model_config.max_model_len)
        self.wake_fd: int | None = self._preparer.wake_fd
        self._preparing: dict[str, ThinkRequest] = {}
        self._generations: dict[str, Generation] = {}
        self._by_engine_id: dict[str, Generation] = {}
        self._steps = 0
        self._text = TextSender(gateway, self.traces, family.rows_per_s)
        self._prefills = Prefills(self._engine, self._media, self._preparer, gateway, self._end_tokens)
        self.limits = StageLimits(
            max_positions=self._engine.model_config.max_model_len,
            speakers=sorted(self._embeddings.voices),
            prefills=self._prefills.most,
        )

    @property
    def ready(self) -> bool:
        """A step would do something."""
        return (
            self._scheduler.has_ready
            or self._preparer.has_outcomes
            or self._can_prefill
            or self._workers.lost
        )

    def accept(self, message: ThinkerInput) -> None:
        """Take a prompt, or the beginning of one.

        Raises:
            RepeatedMessageError: A request of that name is in work.
            UnknownSpeakerError: The checkpoint has no such voice.
            PromptTooLongError: The prompt leaves no room for an answer.
            InvalidRequestError: A token has no embedding, vLLM refuses a sampling parameter, the media are
                not those that the prompt has places for, or no attempt can have given what it resumes from.
            BusyError: Too many beginnings of prompts are in work.
        """
        if self.holds(message.request_id):
            raise RepeatedMessageError(f"request {message.request_id} is in work already")
        if isinstance(message, PrefillRequest):
            self._check_prompt(message)
            self._prefills.accept(message)
            return
        self.traces.begin(message.request_id, message.traceparent, "media" if message.media else "queue")
        self._check_prompt(message)
        self._voice_row(message)
        progress = Progress.of(message)
        most = min(message.sampling.max_tokens, self.limits.max_positions - len(message.prompt_token_ids))
        progress.check(message, most, self._end_tokens, self._engine.model_config.get_vocab_size())
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
        if request_id in self._prefills:
            self._prefills.drop(request_id)
            return
        if self._preparing.pop(request_id, None) is not None:
            self._preparer.release(request_id)
        generation = self._forget(request_id)
        if generation is not None:
            self._engine.abort_request([generation.engine_id], internal=True)

    def step(self) -> dict[str, OmniRelayError]:
        """Compute one step and send what came out of it; gives the requests that failed, with reasons."""
        self._workers.check()
        failures = Failures()
        self._begin_prepared(failures)
        if self._can_prefill:
            self._prefills.begin(failures)
        if not self._scheduler.has_requests():
            return failures
        outputs = self._engine.step()
        self._steps += 1
        self._rows.send(self._track_of, failures)
        for output in outputs:
            if output.request_id in self._prefills and isinstance(output, RequestOutput):
                with failures.only(output.request_id):
                    self._prefills.take(output)
                continue
            generation = self._generations.get(output.request_id)
            if (
                generation is None
                or generation.request_id in failures
                or not isinstance(output, RequestOutput)
            ):
                continue
            with failures.only(generation.request_id):
                if (ended := self._text.send(generation, output)) is not None:
                    self._complete(generation, output, ended)
        for engine_id, reason in self._scheduler.take_failures().items():
            if engine_id in self._by_engine_id:
                failures[self._by_engine_id[engine_id].request_id] = reason
            elif (early := self._prefills.name_of(engine_id)) is not None:
                failures[early] = reason
        return failures

    def load(self) -> StageLoad:
        """What the stage holds now, without prompts that are computed early: they yield to any request."""
        load = engine_load(self._scheduler, self._steps, self._preparer.held_bytes)
        running, waiting = self._scheduler.early_counts()
        waiting = load.waiting - waiting + len(self._preparing)
        return msgspec.structs.replace(load, running=load.running - running, waiting=waiting)

    def holds(self, request_id: str) -> bool:
        """Whether a request is in work here."""
        return (
            request_id in self._generations or request_id in self._preparing or request_id in self._prefills
        )

    def active_requests(self) -> list[str]:
        """The requests in work."""
        return [*self._preparing, *self._generations, *self._prefills.ids()]

    def close(self) -> None:
        """End the processes that decode media, and those of the engine."""
        self._preparer.close()
        self._workers.close()

    def collect(self) -> Iterator[Metric]:
        """What the thinker tells Prometheus besides what all stages do."""
        yield from self._scheduler.collect(self.name)
        yield from self._text.collect()
        yield counter(
            "omnirelay_conditioning_rows_sent_total",
            "Conditioning rows sent to the talker.",
            [({"stage": self.name}, self._rows.sent)],
        )
        yield from self._prefills.collect()
        yield from self._preparer.metrics.collect()

    def _begin_prepared(self, failures: Failures) -> None:
        """Give the engine the requests whose media are ready."""
        for outcome in self._preparer.take():
            request = outcome.request
            early = self._prefills.prepared(request.request_id)
            with failures.only(request.request_id):
                if isinstance(request, ThinkRequest):
                    self._begin(request, outcome.prompt)
                elif early:
                    self._check_length(len(outcome.prompt["prompt_token_ids"]))
                    self._prefills.compute(request, outcome.prompt)

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
        clock = PlaybackClock(message.speech is None or message.speech.streaming)
        self._scheduler.attach(engine_id, clock)
        likeliest = message.sampling.logprobs or 0
        schema = message.sampling.json_schema
        generation = Generation(
            message.request_id, engine_id, length, track, progress, clock, likeliest, schema is not None
        )
        receivers = (self._talker, self._gateway)
        self._scheduler.follow(engine_id, *(partial(each.stalls, message.request_id) for each in receivers))
        self._generations[message.request_id] = generation
        self._by_engine_id[engine_id] = generation
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

    @property
    def _can_prefill(self) -> bool:
        """A prompt can be begun early: no request waits for its media."""
        return self._prefills.has_queued and not self._preparing

    def _check_prompt(self, message: ThinkerInput) -> None:
        self._check_length(len(message.prompt_token_ids))
        vocabulary = self._engine.model_config.get_vocab_size()
        # vLLM checks this only where it makes the prompt itself; here the engine would die of it.
        if (largest := max(message.prompt_token_ids)) >= vocabulary:
            raise InvalidRequestError(
                f"token {largest} of the prompt lies outside the vocabulary of {vocabulary}"
            )
        if message.media:
            check_placeholders(message.prompt_token_ids, message.media, self._media.placeholders)

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
            sampling, made = TextSampling(max_tokens=1), 0
        schema = sampling.json_schema
        return sampling_params(
            sampling,
            stage=self.name,
            seed=message.seed,
            stop_token_ids=self._end_tokens,
            room=room,
            made=made,
            extra_args={SPEECH: progress.needs_rows, PROMPT_TOKENS: length, **answer_penalties(sampling)},
            further={
                "min_p": sampling.min_p,
                "logit_bias": sampling.logit_bias or None,
                "logprobs": sampling.logprobs,
                "structured_outputs": StructuredOutputsParams(json=schema) if schema is not None else None,
            },
        )

    def _track_of(self, engine_id: str) -> TrackWriter | None:
        generation = self._by_engine_id.get(engine_id)
        return generation.track if generation is not None else None

    def _complete(self, generation: Generation, output: RequestOutput, reason: FinishReason) -> None:
        """Close the rows of a request, and forget it."""
        if generation.track is not None:
            self._rows.close(generation.track)
        self._forget(generation.request_id)
        if generation.request_id not in self.traces:
            return
        told = {
            "gen_ai.usage.input_tokens": generation.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens or 0,
            "gen_ai.response.finish_reasons": [reason],
        }
        self.traces.completed(generation.request_id, told)

    def _forget(self, request_id: str) -> Generation | None:
        generation = self._generations.pop(request_id, None)
        if generation is not None:
            self._preparer.release(request_id)
            del self._by_engine_id[generation.engine_id]
        return generation
