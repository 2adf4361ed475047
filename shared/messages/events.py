"""Any stage to gateway: what came out."""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from omnirelay.events import TokenLogprobs
from omnirelay.values import Count, FinishReason, Name, PositiveCount, RequestId, StageName, Text, TokenId
from shared.messages.payloads import Blob, check_tensor


class PromptUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a prompt came to.

    Attributes:
        tokens: Its length, with every placeholder replaced by the tokens of its item.
        cached_tokens: How many of them were found in the prefix cache.
    """

    tokens: PositiveCount
    cached_tokens: Count = 0


class TextDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="text"):
    """Thinker to gateway: the next text tokens, the end token included.

    Attributes:
        token_ids: The tokens.
        finish_reason: Set in the last delta of the request.
        prompt: Set in the first delta of the request.
        logprobs: Of each token, if they were asked for.
    """

    stage: ClassVar[StageName] = "thinker"
    request_id: RequestId
    seq: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=65_536)]
    finish_reason: FinishReason | None = None
    prompt: PromptUsage | None = None
    logprobs: Annotated[list[TokenLogprobs], Meta(max_length=65_536)] = []


class CodecDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="codec"):
    """Talker to gateway: a copy of what went to token2wav, so that the gateway can finish a request.

    Attributes:
        token_ids: As in :class:`CodecTokens`.
        finish_reason: Set in the last delta of the request.
        conditioned: The talker has all conditioning rows: it needs no thinker any more.
    """

    stage: ClassVar[StageName] = "talker"
    request_id: RequestId
    seq: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=65_536)]
    finish_reason: FinishReason | None = None
    conditioned: bool = False


class AudioChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="audio"):
    """Token2wav to gateway: the next piece of the waveform.

    Attributes:
        samples: Number of samples at :data:`SAMPLE_RATE`, mono.
        data: float32 in [-1, 1], little-endian, ``4 * samples`` bytes.
        last: No chunk follows.
    """

    stage: ClassVar[StageName] = "token2wav"
    request_id: RequestId
    seq: Count
    samples: Count
    data: Blob
    last: bool = False

    def check(self) -> None:
        """Raise :class:`PayloadError` if number of samples and bytes do not agree."""
        check_tensor("audio", (self.samples,), "float32", self.data)


class RequestFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="failed"):
    """Any stage to gateway: this request cannot go on.

    Attributes:
        stage: Where it failed.
        code: The ``code`` of a class in :mod:`omnirelay.errors`.
        message: What was wrong, in words for the client.
    """

    request_id: RequestId
    stage: StageName
    code: Name
    message: Text


StageEvent = TextDelta | CodecDelta | AudioChunk | RequestFailed
