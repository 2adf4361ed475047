"""Thinker to talker, talker to token2wav: what speech is made from."""

from typing import ClassVar

import msgspec

from omnirelay.values import ChunkSamples, Count, PositiveCount, Priority, RequestId, SampledIds, TraceParent
from shared.messages.payloads import AdditionalInformationPayload, PromptEmbedsPayload
from shared.messages.request import ResumedSpeech, Route, SpeechSettings


class SpeechStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="speech_start"):
    """Thinker to talker: rows of a new request will follow; other fields are those of :class:`ThinkRequest`.

    Attributes:
        prompt_tokens: Rows of the thinker's prompt that the talker sees, every placeholder replaced.  The
            talker's own prompt is longer, by as many positions as the model family says.
            Where text and speech have both ended nobody needs it, and it counts placeholders as one token.
        speech: The settings, unchanged.
        resume: What is there of the speech already; none for a new request.
    """

    request_id: RequestId
    prompt_tokens: PositiveCount
    priority: Priority
    speech: SpeechSettings
    traceparent: TraceParent | None = None
    resume: ResumedSpeech | None = None
    route: Route | None = None

    @property
    def last(self) -> bool:
        """No rows follow: all codec tokens are there already."""
        return self.resume is not None and self.resume.finish_reason is not None


class ConditioningRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="rows"):
    """Thinker to talker: the next rows of a request's conditioning track.

    Attributes:
        start: Position of the first row; rows follow one another without gap.
        rows: The rows; none is allowed in the last message.
        additional: ``mrope_positions`` for exactly these rows.
        last: No row follows; the talker repeats the last one for as long as it talks.
    """

    request_id: RequestId
    seq: Count
    start: Count
    rows: PromptEmbedsPayload
    additional: AdditionalInformationPayload
    last: bool = False

    def check(self) -> None:
        """Check the rows and what comes with them; a :class:`PayloadError` names the field that is wrong."""
        self.rows.check()
        self.additional.check()


class SynthesisStart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="synthesis_start"
):
    """Talker to token2wav: codec tokens of a new request will follow.

    The fields are those of :class:`SpeechStart`, and

    Attributes:
        chunk_samples: Sizes of the chunks of this stream that the client has; the codec tokens come from the
            start all the same.
    """

    request_id: RequestId
    priority: Priority
    speech: SpeechSettings
    traceparent: TraceParent | None = None
    chunk_samples: ChunkSamples = []
    route: Route | None = None

    last: ClassVar[bool] = False
    """Codec tokens follow."""


class CodecTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="codec_tokens"):
    """Talker to token2wav: the next frames of codec tokens.

    Attributes:
        token_ids: Frame by frame, of each one id of every code book (``[n, groups]``, row-major); the end
            token is not among them.  How many groups there are both stages know from the checkpoint.
        last: No token follows.
    """

    request_id: RequestId
    seq: Count
    token_ids: SampledIds
    last: bool = False


TalkerInput = SpeechStart | ConditioningRows
Token2WavInput = SynthesisStart | CodecTokens
