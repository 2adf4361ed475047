"""Gateway to thinker: a request, and what it is made of."""

from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from omnirelay.values import (
    MAX_BIASES,
    ChunkFrames,
    ChunkSamples,
    Count,
    FinishReason,
    JsonSchema,
    LogitBias,
    Logprobs,
    MediaKind,
    MinP,
    Name,
    Penalty,
    PositiveCount,
    Priority,
    RepetitionPenalty,
    RequestId,
    SampledIds,
    Seed,
    StageName,
    Temperature,
    TokenId,
    TopK,
    TopP,
    TraceParent,
)
from shared.messages.payloads import Blob

Early = Literal["prompt", "recording"]
MEDIA_KINDS: Final[tuple[MediaKind, ...]] = ("audio", "image", "video")
MAX_MEDIA_ITEMS: Final = 256
"""Most sounds, pictures and videos of one request, whatever the configuration allows."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the next token is drawn.

    Attributes:
        max_tokens: Most tokens to generate.
        min_tokens: No end token is drawn before this many.
        temperature: 0 is greedy.
        top_k: Draw from the k most likely; 0 switches it off.
        top_p: Draw from the smallest set of tokens with this probability mass.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens already
            present (prompt included); 1 switches it off (CTRL, arXiv 1909.05858).
    """

    max_tokens: PositiveCount
    min_tokens: Count = 0
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    repetition_penalty: RepetitionPenalty = 1.0


class TextSampling(Sampling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the next text token is drawn.

    Attributes:
        presence_penalty: Taken from the logits of tokens that are in the answer.
        frequency_penalty: Taken from them for each time that they are.
        min_p: Draw from tokens with at least this share of the likeliest one's probability.
        logit_bias: Added to the logits of tokens.
        logprobs: Send the log probability of each token, and so many of the likeliest ones; None sends none.
        json_schema: The answer is JSON that this schema allows.
    """

    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    min_p: MinP = 0.0
    logit_bias: Annotated[dict[TokenId, LogitBias], Meta(max_length=MAX_BIASES)] = {}
    logprobs: Logprobs | None = None
    json_schema: JsonSchema | None = None


class SpeechSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the talker and token2wav need to know of a request.

    Attributes:
        speaker: Name of a voice in the checkpoint.
        sampling: How codec tokens are drawn.
        seed: Seeds the talker's draws and the initial noise of token2wav.
        streaming: Send audio in chunks while the talker talks; else in one piece at the end, which
            equals the reference's waveform.
        chunk_frames: Sizes of the chunks in codec frames, whole blocks; the last one repeats.  None: each is
            cut when its listener needs it.
    """

    speaker: Name
    sampling: Sampling
    seed: Seed
    streaming: bool = True
    chunk_frames: ChunkFrames = []


class MediaItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A sound, picture or video, as its file has it.

    Attributes:
        kind: What it is to the model; the format is found in the data.
        data: The bytes of the file, compressed as they came.
    """

    kind: MediaKind
    data: Blob


class ResumedSpeech(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the gateway holds of the speech of a request that is resumed.

    Attributes:
        codec_token_ids: The codec tokens that came, as in :class:`CodecTokens`.
        finish_reason: Why they ended; none if more are to be drawn.
        chunk_samples: Sizes of the chunks of audio that came; they are not made again.
    """

    codec_token_ids: SampledIds = []
    finish_reason: FinishReason | None = None
    chunk_samples: ChunkSamples = []


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the gateway holds of a request that is resumed: nothing of it is drawn again.

    Attributes:
        text_token_ids: The text tokens that came, the end token included.
        finish_reason: Why they ended; none if more are to be drawn.
        speech: The same of its speech; none for an answer in text only.
    """

    text_token_ids: SampledIds = []
    finish_reason: FinishReason | None = None
    speech: ResumedSpeech | None = None


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The replicas that serve a request, by the names they have drawn; addresses never come from requests.

    Attributes:
        talker: None for an answer in text only, as ``token2wav``.
        alone: The stages whose engine it may end: their steps compute it without other requests.
    """

    thinker: Name
    talker: Name | None = None
    token2wav: Name | None = None
    alone: Annotated[tuple[StageName, ...], Meta(max_length=3)] = ()

    def replica(self, stage: "StageName") -> str | None:
        """Which replica of a stage serves the request; none if no replica does."""
        name: str | None = getattr(self, stage)
        return name


class ThinkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="think"):
    """Gateway to thinker: answer this prompt.

    Attributes:
        prompt_token_ids: The whole prompt, chat template applied; each item of ``media`` is one
            placeholder token in it.
        sampling: How text tokens are drawn.
        seed: Seeds the draws.
        priority: Smaller is served first.
        speech: None for an answer in text only.
        media: What the prompt's placeholders stand for, in their order.
        use_audio_in_video: The sound of the videos is heard, interleaved with their pictures.
        traceparent: The gateway's span of the request; none if it is not traced.
        resume: What is there of the answer already; none for a new request.
        cache_salt: Whose computed prompts, media and schemas it may find in caches; none for everybody's.
        route: Who serves the request; without it, it goes nowhere but to the thinker.
        early: A request that begins with this prompt may follow.  The thinker computes the prompt while no
            request can run, generates nothing, and answers with an empty text.  Of a ``recording`` that
            goes on, with which the prompt ends, it computes what further audio does not change.
    """

    request_id: RequestId
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]
    sampling: TextSampling
    seed: Seed
    priority: Priority = 0
    speech: SpeechSettings | None = None
    media: Annotated[list[MediaItem], Meta(max_length=MAX_MEDIA_ITEMS)] = []
    use_audio_in_video: bool = False
    traceparent: TraceParent | None = None
    resume: Resume | None = None
    cache_salt: Name | None = None
    route: Route | None = None
    early: Early | None = None

    last: ClassVar[bool] = True
    """It is the only message of its request to the thinker."""


ThinkerInput = ThinkRequest
