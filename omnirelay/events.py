"""Events of a request, in the order in which the gateway sends them."""

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from omnirelay.errors import MissingPackageError
from omnirelay.tools import Call
from omnirelay.values import MAX_LOGPROBS, MAX_START_DELAY_S, SAMPLE_BYTES, FinishReason, TokenId

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Samples = npt.NDArray[np.float32]


class AcceptedEvent(msgspec.Struct, frozen=True, kw_only=True, tag="accepted", omit_defaults=True):
    """The request is valid and queued; always the first event.

    Attributes:
        request_id: The gateway's id of the request, as in its logs.
        seed: Of a ``resumable`` request: its seed, or the one that the gateway has drawn for it.
    """

    request_id: str
    seed: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one token of an answer, before penalties and temperature.

    Attributes:
        logprob: Of the token.
        top: The likeliest tokens and theirs, as many as were asked for.
    """

    logprob: float
    top: Annotated[list[tuple[TokenId, float]], Meta(max_length=MAX_LOGPROBS)] = []


class TextEvent(msgspec.Struct, frozen=True, kw_only=True, tag="text", omit_defaults=True):
    """The next piece of the text.

    Attributes:
        token_ids: The tokens, the end token included.
        text: What they add to the text; empty while a character, or what may be a ``stop``, is incomplete.
        logprobs: Of each token, if they were asked for.
        finish_reason: In the last one of a ``resumable`` request: why the text ended.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None


class CodecEvent(msgspec.Struct, frozen=True, kw_only=True, tag="codec", omit_defaults=True):
    """The next codec tokens of a ``resumable`` request; they may come before or after their audio.

    Attributes:
        token_ids: The tokens, without the end token.
        finish_reason: In the last one: why they ended.
    """

    token_ids: list[int]
    finish_reason: FinishReason | None = None


class AudioEvent(msgspec.Struct, frozen=True, tag="audio", omit_defaults=True):
    """The next piece of the speech.

    Attributes:
        seq: 0, 1, 2, …
        pcm: float32 in [-1, 1], little-endian, mono, :data:`omnirelay.values.SAMPLE_RATE` a second.
        start_delay_ms: In the first event: how long to wait before playing it, so that nothing stops later.
    """

    seq: int
    pcm: bytes
    start_delay_ms: Annotated[int, Meta(ge=0, le=1000 * MAX_START_DELAY_S)] = 0

    @property
    def sample_count(self) -> int:
        """Number of samples."""
        return len(self.pcm) // SAMPLE_BYTES

    @property
    def samples(self) -> "Samples":
        """The samples as an array, float32 [n]; needs NumPy."""
        return samples_of(self.pcm)


class DoneEvent(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The answer is complete; the last event.

    Attributes:
        request_id: The gateway's id of the request.
        text: The whole text.
        prompt_token_ids: The prompt, with one placeholder per media item.
        prompt_tokens: Its length with placeholders expanded; 0 from a gateway that does not report it.
        cached_prompt_tokens: How many of them came from the prefix cache.
        calls: Of functions, which the text has as the model writes them.
        text_token_ids: All text tokens, the end token included.
        codec_token_ids: All codec tokens, frame by frame; how long one lasts depends on the model.
        audio_seconds: Length of the speech.
        finish_reason: Why the text ended.
        codec_finish_reason: Why the speech ended; None without speech.
        seed: The seed that reproduces the answer.
        speaker: The voice; None without speech.
        state_seconds: Seconds from *received* to each state, on the gateway's clock.
    """

    request_id: str
    text: str
    prompt_token_ids: list[int]
    text_token_ids: list[int]
    codec_token_ids: list[int]
    audio_seconds: float
    finish_reason: FinishReason
    codec_finish_reason: FinishReason | None
    seed: int
    speaker: str | None
    state_seconds: dict[str, float]
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    calls: list[Call] = []


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The request failed; the last event.

    Attributes:
        code: The ``code`` of a class in :mod:`omnirelay.errors`.
        message: What was wrong.
        retry_after_ms: When to retry, if that helps.
    """

    code: str
    message: str
    retry_after_ms: Annotated[int, Meta(ge=0)] | None = None


def samples_of(pcm: bytes) -> "Samples":
    """Give PCM as an array, float32 [n].

    Raises:
        MissingPackageError: NumPy is not installed.
    """
    try:
        import numpy as np  # noqa: PLC0415 - the client does not install it
    except ModuleNotFoundError as error:
        raise MissingPackageError("numpy", "numpy") from error

    return np.frombuffer(pcm, "<f4").astype(np.float32, copy=False)


Event = AcceptedEvent | TextEvent | CodecEvent | AudioEvent | DoneEvent | ErrorEvent
FinalEvent = DoneEvent | ErrorEvent
