"""What the gateway knows of one request: its input and everything that came out of each stage.

The tokens are kept until the request ends, so that it can be resumed from them on other replicas.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from gateway.requests.lifecycle import Lifecycle, RequestState
from omnirelay.errors import SequenceError
from shared.messages import (
    AudioChunk,
    CodecDelta,
    FinishReason,
    PromptUsage,
    Resume,
    ResumedSpeech,
    StageName,
    TextDelta,
    ThinkRequest,
)

Delta = TextDelta | CodecDelta | AudioChunk
PAST_TOKENS: Final = 16
"""A stage is past a place when it has drawn so many tokens behind it: the last that it drew before it died
may not have arrived here."""


class AnswerProgress(NamedTuple):
    """How much of an answer has come.

    Attributes:
        text: Text tokens.
        codes: Codec tokens.
        chunks: Chunks of audio.
        text_ended: The text is complete.
    """

    text: int
    codes: int
    chunks: int
    text_ended: bool


@dataclass
class TokenStream:
    """The tokens that one stage has sent for a request.

    Attributes:
        token_ids: In the order they were sent, without gap or repeat.
        finish_reason: Why the stream ended; none while it goes on.
        next_seq: The sequence number that must come next; each attempt counts from 0.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    next_seq: int = 0

    @property
    def ended(self) -> bool:
        """Nothing follows."""
        return self.finish_reason is not None

    def take(self, delta: TextDelta | CodecDelta) -> None:
        """Append the next tokens.

        Raises:
            SequenceError: They are not the next ones.
        """
        _check_next("text" if isinstance(delta, TextDelta) else "codec", delta.seq, self.next_seq, self.ended)
        self.next_seq += 1
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason


@dataclass
class AudioProgress:
    """How much audio token2wav has sent for a request.

    Attributes:
        samples: Sum over all chunks.
        ended: Nothing follows.
        chunks: Their number.
        next_seq: The sequence number that must come next; each attempt counts from 0.
    """

    samples: int = 0
    chunks: int = 0
    ended: bool = False
    next_seq: int = 0

    def take(self, chunk: AudioChunk) -> None:
        """Count the next chunk.

        Raises:
            SequenceError: It is not the next one.
        """
        _check_next("audio", chunk.seq, self.next_seq, self.ended)
        self.next_seq += 1
        self.chunks += 1
        self.samples += chunk.samples
        self.ended = chunk.last


class RequestRecord:
    """One request at the stages.

    Args:
        think: What the thinker is asked.
        lifecycle: Its state.
    """

    def __init__(self, think: ThinkRequest, lifecycle: Lifecycle) -> None:
        self.think: Final = think
        self.lifecycle: Final = lifecycle
        self.text: Final = TokenStream()
        self.codec: Final = TokenStream()
        self.audio: Final = AudioProgress()
        self.prompt = PromptUsage(tokens=len(think.prompt_token_ids))
        """As the thinker tells it first; until then, as if the prompt had no placeholder."""
        self.prompt_told = False
        # The talker has all that it needs of the thinker.
        self._conditioned = False

    @property
    def request_id(self) -> str:
        """The gateway's name of the request."""
        return self.think.request_id

    @property
    def speaks(self) -> bool:
        """There is speech to come."""
        return self.think.speech is not None and not (self.codec.ended and self.audio.ended)

    def needs(self, stage: StageName) -> bool:
        """Something is still to come from the stage, or from the next one and may not have reached it."""
        if stage == "thinker":
            return not self.text.ended or (self.speaks and not (self.codec.ended or self._conditioned))
        if stage == "talker":
            return self.speaks
        return self.think.speech is not None and not self.audio.ended

    def computes(self, stage: StageName) -> bool:
        """The stage's engine has something to do for the request, now or soon."""
        if stage == "talker":
            return self.speaks and not self.codec.ended
        if stage == "token2wav" and self.think.speech is not None and not self.think.speech.streaming:
            # One chunk, which begins when all its codec tokens are there.
            return self.codec.ended and not self.audio.ended
        return self.needs(stage)

    @property
    def progress(self) -> AnswerProgress:
        """How far the answer is."""
        return AnswerProgress(
            len(self.text.token_ids), len(self.codec.token_ids), self.audio.chunks, self.text.ended
        )

    def is_past(self, stage: StageName, place: AnswerProgress) -> bool:
        """A stage has computed what it was computing when the answer was so far, in the present attempt."""
        if stage == "thinker":
            if place.text_ended:
                # Its rows alone are missing; that they are there shows when the talker has them all.
                return self._conditioned or self.codec.ended
            return self.text.ended or len(self.text.token_ids) >= place.text + PAST_TOKENS
        if stage == "talker":
            return self.codec.ended or len(self.codec.token_ids) >= place.codes + PAST_TOKENS
        return self.audio.ended or self.audio.chunks > place.chunks

    def begin_attempt(self) -> None:
        """What the stages were doing is lost; what has come from them stays."""
        self.text.next_seq = self.codec.next_seq = self.audio.next_seq = 0
        self._conditioned = False

    def ask(self, attempt: int) -> ThinkRequest:
        """Give what the thinker is asked, but for the route.

        Args:
            attempt: Its number; 0 is the first, which asks for the whole answer.
        """
        if attempt == 0:
            return self.think
        speech = self.think.speech if self.speaks else None
        resumed = ResumedSpeech(
            codec_token_ids=self.codec.token_ids,
            finish_reason=self.codec.finish_reason,
            chunks=self.audio.chunks,
        )
        resume = Resume(
            text_token_ids=self.text.token_ids,
            finish_reason=self.text.finish_reason,
            speech=resumed if speech is not None else None,
        )
        nothing = Resume(speech=ResumedSpeech() if speech is not None else None)
        return msgspec.structs.replace(
            self.think,
            request_id=f"{self.request_id}.{attempt}",
            speech=speech,
            resume=resume if resume != nothing else None,
        )

    def apply(self, delta: Delta) -> None:
        """Take what a stage sent; :meth:`advance` then moves to the state that follows.

        Raises:
            SequenceError: It is not the next of its stream, or of a stream that was not asked for.
        """
        if isinstance(delta, TextDelta):
            if delta.prompt is not None and delta.seq > 0:
                raise SequenceError(f"what the prompt came to was told with text message {delta.seq}, not 0")
            self.text.take(delta)
            if delta.prompt is not None and not self.prompt_told:
                self.prompt = delta.prompt
                self.prompt_told = True
        elif self.think.speech is None:
            raise SequenceError("speech came for a request that asked for text only")
        elif isinstance(delta, CodecDelta):
            self.codec.take(delta)
            self._conditioned = self._conditioned or delta.conditioned
        else:
            self.audio.take(delta)

    def advance(self) -> None:
        """Pass every state whose stage has finished; the streams may end in any order."""
        lifecycle = self.lifecycle
        if lifecycle.state is RequestState.THINKING and self.text.ended:
            speech = self.think.speech is not None
            lifecycle.move(RequestState.TALKING if speech else RequestState.COMPLETED)
        if lifecycle.state is RequestState.TALKING and self.codec.ended:
            lifecycle.move(RequestState.SYNTHESIZING)
        if lifecycle.state is RequestState.SYNTHESIZING and self.audio.ended:
            lifecycle.move(RequestState.COMPLETED)


def stage_of(delta: Delta) -> StageName:
    """Which stage sends such messages."""
    if isinstance(delta, TextDelta):
        return "thinker"
    return "talker" if isinstance(delta, CodecDelta) else "token2wav"


def _check_next(stream: str, seq: int, expected: int, ended: bool) -> None:
    if ended:
        raise SequenceError(f"{stream} message {seq} came after the last one")
    if seq != expected:
        raise SequenceError(f"{stream} message {seq} came where {expected} was due")
