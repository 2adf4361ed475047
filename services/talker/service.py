"""The talker's work: conditioning rows in, codec tokens to token2wav and the gateway."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import Metric
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput

from omnirelay.errors import (
    BusyError,
    InvalidRequestError,
    OmniRelayError,
    PromptTooLongError,
    RepeatedMessageError,
    SequenceError,
)
from omnirelay.status import CodecLimits
from services.generating import GeneratingService
from services.talker.engine import build_talker
from services.talker.family import TalkerFamily
from services.talker.scheduler import TalkerScheduler
from services.talker.track import ConditioningTrack
from shared.config import TalkerConfig
from shared.messages import (
    SAMPLE_RATE,
    CodecDelta,
    CodecTokens,
    ConditioningRows,
    FinishReason,
    ResumedSpeech,
    SpeechStart,
    StageEvent,
    StageLimits,
    StageLoad,
    StageName,
    SynthesisStart,
    TalkerInput,
    Token2WavInput,
)
from shared.metrics import gauge
from shared.playback import PlaybackClock
from shared.stage.resume import check_resumed
from shared.stage.service import Failures
from shared.transport.routing import Outlet
from shared.vllm.sampling.generation import begin_of_decoding, finish_reason, sampling_params
from shared.vllm.tensors import DTYPE_NAMES, unpack_positions


@dataclass
class _Speech:
    """A request in work: codec tokens not sent yet, frames in all, and those of an earlier attempt."""

    request_id: str
    engine_id: str
    track: ConditioningTrack
    clock: PlaybackClock
    resumed: int = 0
    seq: int = 0
    unsent: list[int] = field(default_factory=list)
    made: int = 0


class TalkerService(GeneratingService[TalkerInput]):
    """Speaks replies; see :class:`shared.stage.service.StageService` for the protocol."""

    name: StageName = "talker"
    _scheduler: TalkerScheduler

    def __init__(
        self,
        family: TalkerFamily,
        model: Path,
        config: TalkerConfig,
        gateway: Outlet[StageEvent],
        token2wav: Outlet[Token2WavInput],
    ) -> None:
        engine, self._rules = build_talker(family, model, config)
        super().__init__(engine, gateway, token2wav)
        self._max_held_bytes = config.max_held_bytes
        self._codec: CodecLimits = self._rules.codec
        self._dtype = engine.model_config.dtype
        self._speeches: dict[str, _Speech] = {}
        # Requests that were spoken to their end while the thinker still writes.
        self._awaiting_last_rows: set[str] = set()
        self.limits = StageLimits(
            max_positions=engine.model_config.max_model_len,
            codec=self._codec,
            batch=engine.vllm_config.scheduler_config.max_num_seqs,
        )

    @property
    def ready(self) -> bool:
        """A step would compute something."""
        return self._scheduler.has_ready or self._workers.lost

    def accept(self, message: TalkerInput) -> None:
        """Take a message of the thinker.

        Raises:
            SequenceError: It is not the next one of a request known here.
            PayloadError: The rows do not fit this model.
            RequestError: The request cannot be spoken; its client is told.
        """
        if isinstance(message, SpeechStart):
            self._start(message)
        else:
            self._take_rows(message)

    def abort(self, request_id: str) -> None:
        """Drop a request, if it is here."""
        self._awaiting_last_rows.discard(request_id)
        speech = self._speeches.pop(request_id, None)
        if speech is not None:
            self._engine.abort_request([speech.engine_id], internal=True)

    def step(self) -> dict[str, OmniRelayError]:
        """Compute one step and send what came out of it; gives the requests that failed, with reasons."""
        self._workers.check()
        failures = Failures()
        for output in self._compute():
            if (speech := self._speeches.get(output.request_id)) is not None:
                with failures.only(speech.request_id):
                    self._send(speech, output)
        unscheduled = self._scheduler.take_failures()
        for speech in self._speeches.values():
            if speech.engine_id in unscheduled:
                failures[speech.request_id] = unscheduled[speech.engine_id]
        return failures

    def load(self) -> StageLoad:
        """What the stage holds now."""
        return self._engine_load(self._scheduler.held_bytes)

    def holds(self, request_id: str) -> bool:
        """Whether a request is in work here."""
        return request_id in self._speeches

    def active_requests(self) -> list[str]:
        """The requests in work."""
        return [*self._speeches, *self._awaiting_last_rows]

    def collect(self) -> Iterator[Metric]:
        """What the talker tells Prometheus besides what all stages do."""
        yield from self._scheduler.collect(self.name)
        yield gauge(
            "omnirelay_conditioning_rows_held",
            "Conditioning rows that the talker holds for requests.",
            [({"stage": self.name}, self._scheduler.held_rows)],
        )

    def _start(self, message: SpeechStart) -> None:
        if message.request_id in self._speeches or message.request_id in self._awaiting_last_rows:
            raise RepeatedMessageError(f"request {message.request_id} is in work already")
        self.traces.begin(message.request_id, message.traceparent, "wait_rows")
        resume = message.resume or ResumedSpeech()
        prompt_positions = message.prompt_tokens + self._codec.start_positions
        room = self.limits.max_positions - prompt_positions
        frames = self._resumed_frames(resume, min(message.speech.sampling.max_tokens, max(room, 1)))
        if resume.finish_reason is not None:
            self._announce(message, resume)
            self.traces.completed(message.request_id, {})
            return
        params = sampling_params(
            message.speech.sampling,
            stage=self.name,
            seed=message.speech.seed,
            stop_token_ids=self._rules.end_tokens,
            room=room,
            made=len(frames),
        )
        self._check_room(prompt_positions)
        track = ConditioningTrack(prompt_positions, self._rules.row_width, self._dtype, self._codec.groups)
        track.further_codes += [frame[1:] for frame in frames] if self._codec.groups > 1 else []
        prompt = self._rules.prompt(message.prompt_tokens, message.speech.speaker) + [
            frame[0] for frame in frames
        ]
        clock = PlaybackClock(message.speech.streaming)
        engine_id = self._submit(message, tokens_input(prompt), params, message.priority, clock)
        self._scheduler.condition(engine_id, track)
        self._speeches[message.request_id] = _Speech(
            message.request_id, engine_id, track, clock, resumed=len(frames), made=len(frames)
        )
        self._announce(message, resume)

    def _resumed_frames(self, resume: ResumedSpeech, most: int) -> list[list[int]]:
        """The frames that an earlier attempt sampled; raises InvalidRequestError if none can have."""
        codes, groups = resume.codec_token_ids, self._codec.groups
        if len(codes) % groups:
            raise InvalidRequestError(
                f"resume.codec_token_ids: {len(codes)} ids are no whole frames of {groups}"
            )
        frames = [codes[first : first + groups] for first in range(0, len(codes), groups)]
        check_resumed(
            "resume.codec_token_ids",
            [frame[0] for frame in frames],
            resume.finish_reason,
            most=most,
            end_tokens=self._rules.end_tokens,
            vocabulary=self._rules.ids,
            keeps_end=False,
        )
        if groups > 1 and codes and max(codes) >= self._rules.ids:
            raise InvalidRequestError(
                f"resume.codec_token_ids: token {max(codes)} lies outside the code books of {self._rules.ids}"
            )
        return frames

    def _announce(self, message: SpeechStart, resume: ResumedSpeech) -> None:
        """Tell token2wav of a request, and what there is of it."""
        self._following.put(
            SynthesisStart(
                request_id=message.request_id,
                priority=message.priority,
                speech=message.speech,
                traceparent=message.traceparent,
                chunk_samples=resume.chunk_samples,
                route=message.route,
            )
        )
        ended = resume.finish_reason is not None
        if resume.codec_token_ids or ended:
            self._following.put(
                CodecTokens(
                    request_id=message.request_id, seq=0, token_ids=resume.codec_token_ids, last=ended
                )
            )

    def _check_room(self, positions: int) -> None:
        """Refuse before anything is allocated; rows of requests already taken are never refused."""
        wanted = positions * self._rules.row_width * self._dtype.itemsize
        held = self._scheduler.held_bytes
        if wanted > self._max_held_bytes:
            raise PromptTooLongError(
                f"the prompt has {wanted} bytes of conditioning rows, the talker takes at most "
                f"{self._max_held_bytes} (stages.talker.max_held_bytes)"
            )
        if held + wanted > self._max_held_bytes:
            raise BusyError(
                f"the talker holds {held} bytes of conditioning rows, no room for {wanted} more", 1000
            )

    def _take_rows(self, message: ConditioningRows) -> None:
        if message.request_id in self._awaiting_last_rows:
            if message.last:
                self._awaiting_last_rows.discard(message.request_id)
            return
        speech = self._speeches.get(message.request_id)
        if speech is None:
            raise SequenceError(f"rows for request {message.request_id}, which is not known here")
        track = speech.track
        track.expect(message.seq, message.start)
        message.rows.check_fits(self._rules.row_width, DTYPE_NAMES[self._dtype])
        positions = unpack_positions(message.additional, message.rows.shape[0])
        waited = track.length < track.prompt_positions
        track.append(message.rows, positions, message.last)
        if waited and track.length >= track.prompt_positions:
            self.traces.enter(message.request_id, "queue")
        if not track.speakable:
            self._engine.abort_request([speech.engine_id], internal=True)
            self._deliver(speech, [], "stop")

    def _send(self, speech: _Speech, output: RequestOutput) -> None:
        completion = output.outputs[0]
        reason = finish_reason(completion) if output.finished else None
        codes = [token for token in completion.token_ids if token not in self._rules.end_tokens]
        if speech.made == speech.resumed:
            begin_of_decoding(self.traces, speech.request_id, output)
        self._deliver(speech, codes, reason)

    def _deliver(self, speech: _Speech, codes: list[int], reason: FinishReason | None) -> None:
        """Send frames, of which ``codes`` are the first ids, once token2wav can begin with what there is."""
        before = speech.made
        speech.made += len(codes)
        speech.clock.made(len(codes) * self._codec.frame_samples / SAMPLE_RATE)
        speech.unsent += _frames(speech.track, before, codes) if self._codec.groups > 1 else codes
        whole = self._rules.codes_per_message
        if reason is None and speech.made // whole == before // whole:
            return
        request_id, seq, codes = speech.request_id, speech.seq, speech.unsent
        speech.seq += 1
        speech.unsent = []
        if reason is not None:
            del self._speeches[request_id]
            if not speech.track.closed:
                self._awaiting_last_rows.add(request_id)
        self._following.put(
            CodecTokens(
                request_id=request_id,
                seq=seq + (speech.resumed > 0),
                token_ids=codes,
                last=reason is not None,
            )
        )
        self._gateway.put(
            CodecDelta(
                request_id=request_id,
                seq=seq,
                token_ids=codes,
                finish_reason=reason,
                conditioned=speech.track.closed,
            )
        )
        if reason is not None:
            self.traces.completed(request_id, {"gen_ai.response.finish_reasons": [reason]})


def _frames(track: ConditioningTrack, first: int, codes: list[int]) -> list[int]:
    """All ids of new frames, frame by frame, the first of which is the ``first`` of the speech."""
    further = track.further_codes[first : first + len(codes)]
    return [each for code, others in zip(codes, further, strict=True) for each in (code, *others)]
