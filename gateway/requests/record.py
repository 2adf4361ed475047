"""The answer to one request so far.

Tokens are kept until the request ends, so that it can resume on other replicas.
"""

from collections.abc import Container
from dataclasses import dataclass, field

import msgspec

from gateway.requests.lifecycle import Lifecycle, RequestState
from omnirelay.errors import InvalidResumeError, SequenceError
from omnirelay.protocol import PartialAnswer
from omnirelay.status import CodecLimits
from shared.messages import (
    AudioChunk,
    CodecDelta,
    FinishReason,
    PromptUsage,
    Resume,
    ResumedSpeech,
    Route,
    SpeechSettings,
    StageName,
    TextDelta,
    ThinkRequest,
)

Delta = TextDelta | CodecDelta | AudioChunk


@dataclass
class TokenStream:
    """Tokens received from one stage; ``next_seq`` is the expected sequence number, 0 in a new attempt."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    next_seq: int = 0

    @property
    def ended(self) -> bool:
        """The stream is complete."""
        return self.finish_reason is not None

    def take(self, delta: TextDelta | CodecDelta) -> None:
        """Append tokens; SequenceError if the message is not the next one."""
        _check_next("text" if isinstance(delta, TextDelta) else "codec", delta.seq, self.next_seq, self.ended)
        self.next_seq += 1
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason


@dataclass
class AudioProgress:
    """Audio received, in samples; ``next_seq`` as of :class:`TokenStream`."""

    samples: int = 0
    chunk_samples: list[int] = field(default_factory=list)
    ended: bool = False
    next_seq: int = 0

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.chunk_samples)

    def take(self, chunk: AudioChunk) -> None:
        """Count a chunk; SequenceError if it is not the next one."""
        _check_next("audio", chunk.seq, self.next_seq, self.ended)
        self.next_seq += 1
        self.chunk_samples.append(chunk.samples)
        self.samples += chunk.samples
        self.ended = chunk.last


@dataclass(eq=False)
class RequestRecord:
    """One request at the stages.

    Attributes:
        prompt: The thinker's first count; until then each placeholder counts as one token.
        _partial: The checked beginning of the answer, which the client has.
        _conditioned: The talker has all conditioning rows.
    """

    think: ThinkRequest
    lifecycle: Lifecycle
    _partial: PartialAnswer | None = None
    _codec: CodecLimits = field(default_factory=CodecLimits)
    text: TokenStream = field(default_factory=TokenStream)
    codec: TokenStream = field(default_factory=TokenStream)
    audio: AudioProgress = field(default_factory=AudioProgress)
    _prompt_told: bool = False
    _conditioned: bool = False

    def __post_init__(self) -> None:
        self.request_id = self.think.request_id
        self.prompt = PromptUsage(tokens=len(self.think.prompt_token_ids))
        if (partial := self._partial) is not None:
            self.text.token_ids += partial.text_token_ids
            self.text.finish_reason = partial.text_finish_reason
            self.codec.token_ids += partial.codec_token_ids
            self.codec.finish_reason = partial.codec_finish_reason
            self.audio.chunk_samples += partial.chunk_samples
            self.audio.samples = sum(partial.chunk_samples)
            self._note_all_audio()

    @property
    def speaks(self) -> bool:
        """Speech is still to come."""
        return self.think.speech is not None and not (self.codec.ended and self.audio.ended)

    @property
    def is_whole(self) -> bool:
        """Nothing of the answer is missing."""
        return self.text.ended and not self.speaks

    def needs(self, stage: StageName) -> bool:
        """The stage, or the next one, may still lack something from it."""
        if stage == "thinker":
            # It passes on codes that are whole: nothing else would say that it was lost before.
            passed = self._conditioned or (self.codec.ended and self.text.next_seq + self.audio.next_seq > 0)
            return not self.text.ended or (self.speaks and not passed)
        if stage == "talker":
            return self.speaks
        return self.think.speech is not None and not self.audio.ended

    def computes(self, stage: StageName) -> bool:
        """The stage's engine has work for the request, now or soon."""
        if stage == "talker":
            return self.speaks and not self.codec.ended
        if stage == "token2wav" and self.think.speech is not None and not self.think.speech.streaming:
            # One chunk, which needs all codec tokens.
            return self.codec.ended and not self.audio.ended
        return self.needs(stage)

    def begin_attempt(self) -> None:
        """Reset what belongs to an attempt; the answer so far stays."""
        self.text.next_seq = self.codec.next_seq = self.audio.next_seq = 0
        self._conditioned = False

    def ask(self, attempt: int, route: Route) -> ThinkRequest:
        """The thinker's request: attempt 0 asks for what the client lacks, others resume."""
        if attempt == 0 and self._partial is None:
            return msgspec.structs.replace(self.think, route=route)
        speech = self.think.speech if self.speaks else None
        resumed = ResumedSpeech(
            codec_token_ids=self.codec.token_ids,
            finish_reason=self.codec.finish_reason,
            chunk_samples=self.audio.chunk_samples,
        )
        resume = Resume(
            text_token_ids=self.text.token_ids,
            finish_reason=self.text.finish_reason,
            speech=resumed if speech is not None else None,
        )
        nothing = Resume(speech=ResumedSpeech() if speech is not None else None)
        return msgspec.structs.replace(
            self.think,
            request_id=f"{self.request_id}.{attempt}" if attempt else self.request_id,
            speech=speech,
            resume=resume if resume != nothing else None,
            route=route,
        )

    def apply(self, delta: Delta) -> None:
        """Take a stage's message; SequenceError if it is out of sequence or its stream was not requested."""
        if isinstance(delta, TextDelta):
            if delta.prompt is not None and delta.seq > 0:
                raise SequenceError(f"prompt usage came with text message {delta.seq}, not 0")
            self.text.take(delta)
            if delta.prompt is not None and not self._prompt_told:
                self.prompt, self._prompt_told = delta.prompt, True
        elif self.think.speech is None:
            raise SequenceError("speech came for a text-only request")
        elif isinstance(delta, CodecDelta):
            self.codec.take(delta)
            self._conditioned = self._conditioned or delta.conditioned
        else:
            self.audio.take(delta)

    def advance(self) -> None:
        """Move through the states of finished stages; streams may end in any order."""
        lifecycle = self.lifecycle
        self._note_all_audio()
        if lifecycle.state is RequestState.THINKING and self.text.ended:
            speech = self.think.speech is not None
            lifecycle.move(RequestState.TALKING if speech else RequestState.COMPLETED)
        if lifecycle.state is RequestState.TALKING and self.codec.ended:
            lifecycle.move(RequestState.SYNTHESIZING)
        if lifecycle.state is RequestState.SYNTHESIZING and self.audio.ended:
            lifecycle.move(RequestState.COMPLETED)

    def _note_all_audio(self) -> None:
        """Note the end of audio that the client had: it was not told which piece was the last."""
        frames = len(self.codec.token_ids) // self._codec.groups
        samples = samples_of(self._codec, frames)
        if self._partial is not None and self.codec.ended and samples and self.audio.samples == samples:
            self.audio.ended = True


def _check_next(stream: str, seq: int, expected: int, ended: bool) -> None:
    if ended:
        raise SequenceError(f"{stream} message {seq} came after the last one")
    if seq != expected:
        raise SequenceError(f"{stream} message {seq} came, expected {expected}")


def samples_of(codec: CodecLimits, frames: int) -> int:
    """Samples of a stream of so many codec frames."""
    return max(0, frames * codec.frame_samples - codec.trimmed_samples)


def check_partial(
    partial: PartialAnswer,
    think: ThinkRequest,
    codec: CodecLimits,
    vocabulary: int,
    placeholders: Container[int],
) -> None:
    """Check a partial answer, in time bounded by what the request may generate, or InvalidResumeError."""
    _require_at_most("text_token_ids", len(partial.text_token_ids), think.sampling.max_tokens)
    for index, token in enumerate(partial.text_token_ids):
        if token >= vocabulary:
            raise InvalidResumeError(
                f"text_token_ids[{index}]: token {token} lies outside the vocabulary of {vocabulary}"
            )
        if token in placeholders:
            problem = f"text_token_ids[{index}]: token {token} is the placeholder of a media item"
            raise InvalidResumeError(problem)
    if partial.text_finish_reason is not None and not partial.text_token_ids:
        raise InvalidResumeError("text_finish_reason: a text that has ended has tokens")
    if think.speech is not None:
        _check_speech(partial, think.speech, codec)
    elif partial.codec_token_ids or partial.codec_finish_reason is not None or partial.chunk_samples:
        raise InvalidResumeError("codec_token_ids, chunk_samples: an answer in text only has no speech")


def _check_speech(partial: PartialAnswer, speech: SpeechSettings, codec: CodecLimits) -> None:
    codes, each = partial.codec_token_ids, codec.frame_samples
    most = speech.sampling.max_tokens
    _require_at_most("codec_token_ids", len(codes), most * codec.groups)
    if len(codes) % codec.groups:
        problem = f"codec_token_ids: {len(codes)} ids are no whole frames of {codec.groups} ids"
        raise InvalidResumeError(problem)
    if not speech.streaming and len(partial.chunk_samples) > 1:
        raise InvalidResumeError("chunk_samples: speech that is not streamed comes in one piece")
    _require_at_most("chunk_samples", len(partial.chunk_samples), most)
    trimmed = codec.trimmed_samples
    for index, samples in enumerate(partial.chunk_samples):
        if not samples or (samples + (0 if index else trimmed)) % each:
            less = f" but for the {trimmed} that the first lacks" if trimmed and not index else ""
            raise InvalidResumeError(
                f"chunk_samples[{index}]: {samples} samples are no whole frames of {each} samples{less}"
            )
    # While codec tokens are missing, their audio may have come before them.
    ended = partial.codec_finish_reason is not None
    frames = -(-sum(partial.chunk_samples) // each)
    bound = len(codes) // codec.groups if ended else most
    if frames > bound:
        raise InvalidResumeError(
            f"chunk_samples: chunks of {frames} frames together, from at most {bound} frames of codec tokens"
        )


def _require_at_most(field: str, length: int, most: int) -> None:
    if length > most:
        raise InvalidResumeError(f"{field}: {length} items, this request has at most {most}")
