"""The thinker's work: prompts in, text tokens to the gateway, conditioning rows to the talker."""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client.core import Metric
from vllm import SamplingParams
from vllm.inputs import MultiModalInput, TokensInput, tokens_input
from vllm.outputs import RequestOutput

from omnirelay.errors import (
    BusyError,
    InvalidRequestError,
    OmniRelayError,
    PromptTooLongError,
    RepeatedMessageError,
    UnknownSpeakerError,
)
from services.generating import GeneratingService
from services.thinker.engine import build_thinker, salted, speech_writer, text_params
from services.thinker.family import ThinkerFamily
from services.thinker.grammars import Grammars
from services.thinker.media.preparer import EARLY_RETRY_MS, MediaPreparer
from services.thinker.media.rules import check_encodable, check_placeholders
from services.thinker.resume import Progress
from services.thinker.scheduler import EARLY_PRIORITY, ThinkerScheduler
from services.thinker.text_sender import Generation, TextSender
from services.thinker.track import RowSender, TrackWriter
from shared.config import MediaConfig, ThinkerConfig
from shared.messages import (
    FinishReason,
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
from shared.messages.payloads import DEFAULT_MAX_PAYLOAD_BYTES
from shared.metrics import counter
from shared.playback import PlaybackClock
from shared.stage.service import Failures
from shared.transport.routing import Outlet

MAX_EARLY: Final = 8
"""Prompts at a time that are computed ahead of their requests."""


class ThinkerService(GeneratingService[ThinkerInput]):
    """Answers prompts; see :class:`shared.stage.service.StageService` for the protocol."""

    name: StageName = "thinker"
    _scheduler: ThinkerScheduler

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
        engine, self._media = build_thinker(family, model, config, media)
        super().__init__(engine, gateway, talker)
        self._speech = speech_writer(family, engine, model)
        self._rows = RowSender(engine, self._scheduler, talker, max_payload_bytes, self._speech.further_rows)
        self._end_tokens = family.end_tokens(engine.model_config.hf_config)
        self._preparer = MediaPreparer(self._media, media, engine.model_config.max_model_len)
        self.wake_fd = self._preparer.wake_fd
        self._grammars = Grammars(engine, self._end_tokens, self._preparer.wake_fd)
        # The progress of each request that the engine does not have yet.
        self._accepted: dict[str, Progress] = {}
        self._preparing: dict[str, ThinkRequest] = {}
        self._generations: dict[str, Generation] = {}
        self._by_engine_id: dict[str, Generation] = {}
        self._text = TextSender(gateway, self.traces, family.rows_per_s)
        # Prompts to compute ahead of their requests, whose media are prepared when no others are.
        self._early: deque[ThinkRequest] = deque()
        cached = engine.vllm_config.cache_config.enable_prefix_caching
        self.limits = StageLimits(
            max_positions=engine.model_config.max_model_len,
            speakers=sorted(self._speech.voices),
            prefills=MAX_EARLY if cached else 0,
            batch=engine.vllm_config.scheduler_config.max_num_seqs,
        )

    @property
    def ready(self) -> bool:
        """A step would do something."""
        return (
            self._scheduler.has_ready
            or self._preparer.has_outcomes
            or self._grammars.has_outcomes
            or self._can_begin_early
            or self._workers.lost
        )

    def accept(self, message: ThinkerInput) -> None:
        """Take a prompt.

        Raises:
            RepeatedMessageError: A request of that name is in work.
            UnknownSpeakerError: The checkpoint has no such voice.
            PromptTooLongError: The prompt leaves no room for an answer.
            InvalidRequestError: A token has no embedding, vLLM refuses a sampling parameter, the media are
                not those that the prompt has places for, or no attempt can have given what it resumes from.
            BusyError: Too many prompts are being computed ahead of their requests.
        """
        if self.holds(message.request_id):
            raise RepeatedMessageError(f"request {message.request_id} is in work already")
        self.traces.begin(message.request_id, message.traceparent, "media" if message.media else "queue")
        self._check_prompt(message)
        self._check_voice(message)
        progress = Progress.of(message)
        if message.early is not None:
            self._check_early(message)
        else:
            most = min(message.sampling.max_tokens, self.limits.max_positions - len(message.prompt_token_ids))
            progress.check(message, most, self._end_tokens, self._engine.model_config.get_vocab_size())
        self._accepted[message.request_id] = progress
        if message.early is not None:
            self._early.append(message)
        elif not progress.needs_engine:
            del self._accepted[message.request_id]
            self._announce(message, self._track(message, message.prompt_token_ids))
            self.traces.completed(message.request_id, {})
        elif _follows_schema(message, progress):
            self._grammars.submit(message)
        else:
            self._prepare(message)

    def abort(self, request_id: str) -> None:
        """Drop a request, if it is here."""
        self._grammars.release(request_id)
        self._accepted.pop(request_id, None)
        self._early = deque(each for each in self._early if each.request_id != request_id)
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
        while self._can_begin_early:
            early = self._early.popleft()
            with failures.only(early.request_id):
                self._prepare(early)
        if not self._scheduler.has_requests():
            return failures
        outputs = self._compute()
        self._rows.send(self._track_of, failures)
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is None or generation.request_id in failures:
                continue
            with failures.only(generation.request_id):
                if (ended := self._text.send(generation, output)) is not None:
                    self._complete(generation, output, ended)
        for engine_id, reason in self._scheduler.take_failures().items():
            if engine_id in self._by_engine_id:
                failures[self._by_engine_id[engine_id].request_id] = reason
        return failures

    def load(self) -> StageLoad:
        """What the stage holds now, without prompts that are computed early: they yield to any request."""
        load = self._engine_load(self._preparer.held_bytes)
        running, waiting = self._scheduler.early_counts()
        preparing = sum(each.early is None for each in self._preparing.values())
        waiting = load.waiting - waiting + preparing + len(self._grammars.waiting)
        return msgspec.structs.replace(load, running=load.running - running, waiting=waiting)

    def active_requests(self) -> list[str]:
        """The requests in work."""
        early = (each.request_id for each in self._early)
        return [*self._grammars.waiting, *self._preparing, *self._generations, *early]

    def close(self) -> None:
        """End the processes that compile schemas and decode media, and those of the engine."""
        self._grammars.close()
        self._preparer.close()
        super().close()

    def collect(self) -> Iterator[Metric]:
        """What the thinker tells Prometheus besides what all stages do."""
        yield from self._scheduler.collect(self.name)
        yield from self._text.collect()
        yield counter(
            "omnirelay_conditioning_rows_sent_total",
            "Conditioning rows sent to the talker.",
            [({"stage": self.name}, self._rows.sent)],
        )
        yield from self._preparer.metrics.collect()

    def _prepare(self, message: ThinkRequest) -> None:
        """Begin with a request, once its media are ready."""
        if message.media:
            self._preparing[message.request_id] = message
            self._preparer.submit(message)
        else:
            self._begin(message, tokens_input(message.prompt_token_ids))

    def _begin_prepared(self, failures: Failures) -> None:
        """Give the engine the requests whose grammars and media are ready."""
        for request, compiled in self._grammars.take():
            with failures.only(request.request_id):
                compiled.result()
                self._prepare(request)
        for request, prepared in self._preparer.take():
            with failures.only(request.request_id):
                prompt = prepared.result()
                check_encodable(prompt, self._scheduler.max_num_encoder_input_tokens)
                self._begin(request, prompt)

    def _begin(self, message: ThinkRequest, prompt: TokensInput | MultiModalInput) -> None:
        """Give a request to the engine, and tell the talker of it."""
        length = len(prompt["prompt_token_ids"])
        progress = self._accepted.pop(message.request_id)
        track = self._track(message, prompt["prompt_token_ids"])
        params = self._params(message, progress, length)
        prompt = salted(progress.behind(prompt), message.cache_salt)
        grammar = None
        if _follows_schema(message, progress):
            grammar = self._grammars.begin(message.request_id, progress.replayed_tokens)
        priority = message.priority if message.early is None else EARLY_PRIORITY
        clock = PlaybackClock(message.speech is None or message.speech.streaming)
        engine_id = self._submit(message, prompt, params, priority, clock)
        if grammar is not None:
            self._grammars.attach(engine_id, grammar)
        written = track if progress.needs_rows else None
        generation = Generation(message, engine_id, length, written, progress, clock)
        self._generations[message.request_id] = generation
        self._by_engine_id[engine_id] = generation
        if self._preparing.pop(message.request_id, None) is not None:
            self.traces.enter(message.request_id, "queue")
        self._announce(message, track)

    def _track(self, message: ThinkRequest, prompt: Sequence[int]) -> TrackWriter | None:
        """Begin the track of a request, if it is to be spoken."""
        if message.speech is None:
            return None
        return self._speech.track(message.request_id, prompt, message.speech.speaker)

    def _announce(self, message: ThinkRequest, track: TrackWriter | None) -> None:
        """Tell the talker of a request, if it is to be spoken."""
        if message.speech is not None and track is not None:
            self._following.put(
                SpeechStart(
                    request_id=message.request_id,
                    prompt_tokens=track.prompt_rows,
                    priority=message.priority,
                    speech=message.speech,
                    traceparent=message.traceparent,
                    resume=message.resume.speech if message.resume else None,
                    route=message.route,
                )
            )

    @property
    def _can_begin_early(self) -> bool:
        """A prompt can be begun early: no media of another one are prepared."""
        return bool(self._early) and not self._preparing

    def _check_early(self, message: ThinkRequest) -> None:
        if message.speech is not None or message.resume is not None:
            raise InvalidRequestError("early: nothing is generated that is spoken, or resumed")
        going_on = [self._media.placeholders.get(kind) for kind in ("audio", "video")]
        if message.early == "recording" and not (message.media and message.prompt_token_ids[-1] in going_on):
            raise InvalidRequestError("early: the prompt does not end with a recording")
        in_work = len(self._early) + sum(self._scheduler.early_counts())
        in_work += sum(each.early is not None for each in self._preparing.values())
        if in_work >= self.limits.prefills:
            problem = f"{self.limits.prefills} prompts are being computed early, the maximum"
            raise BusyError(problem, EARLY_RETRY_MS)

    def _check_prompt(self, message: ThinkerInput) -> None:
        length, most = len(message.prompt_token_ids), self.limits.max_positions - 1
        if length > most:
            raise PromptTooLongError(f"the prompt has {length} tokens, the thinker takes at most {most}")
        vocabulary = self._engine.model_config.get_vocab_size()
        # vLLM checks this only where it makes the prompt itself; here the engine would die of it.
        if (largest := max(message.prompt_token_ids)) >= vocabulary:
            raise InvalidRequestError(
                f"token {largest} of the prompt lies outside the vocabulary of {vocabulary}"
            )
        check_placeholders(message.prompt_token_ids, message.media, self._media.placeholders)

    def _check_voice(self, message: ThinkRequest) -> None:
        if message.speech is not None and message.speech.speaker not in self._speech.voices:
            raise UnknownSpeakerError(
                f"no voice {message.speech.speaker!r}, this checkpoint has {', '.join(self.limits.speakers)}"
            )

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
        return text_params(
            sampling,
            seed=message.seed,
            end_tokens=self._end_tokens,
            room=room,
            made=made,
            wants_rows=progress.needs_rows,
        )

    def _track_of(self, engine_id: str) -> TrackWriter | None:
        generation = self._by_engine_id.get(engine_id)
        return generation.track if generation is not None else None

    def _complete(self, generation: Generation, output: RequestOutput, reason: FinishReason) -> None:
        """Close the rows of a request, and forget it."""
        if generation.track is not None:
            self._rows.close(generation.track)
        self._forget(generation.request_id)
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


def _follows_schema(message: ThinkRequest, progress: Progress) -> bool:
    """Whether something is to be drawn that a JSON schema must allow."""
    return message.sampling.json_schema is not None and progress.finish_reason is None
