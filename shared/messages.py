"""Every message that crosses a socket between two OmniRelay processes, field by field.

A message is a msgspec struct with a tag; :mod:`shared.wire` turns it into ZeroMQ frames and back.
Tensor bytes never sit inside the header: a field of type :class:`shared.payloads.Blob` travels as a frame
of its own.

Edges (the direction data flows)::

    gateway   -> thinker    ThinkRequest
    thinker   -> talker     SpeechStart, ConditioningRows
    talker    -> token2wav  SynthesisStart, CodecTokens
    any stage -> gateway    TextDelta, CodecDelta, AudioChunk, RequestFailed
    control, to the gateway Heartbeat, AbortDone, Farewell
    control, to a stage     Peers, Abort, Closing
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shared.payloads import AdditionalInformationPayload, Blob, Name, PromptEmbedsPayload, check_tensor

SAMPLE_RATE: Final = 24_000
"""Samples per second of every waveform, fixed by the model's vocoder."""

CODEC_RATE: Final = 50
"""Codec tokens per second of speech, fixed by the model."""

StageName = Literal["thinker", "talker", "token2wav"]
HEARTBEAT_SUFFIX: Final = ".heartbeat"
"""On the control socket the heartbeats of a replica go by its identity with this behind."""
MAX_REPLICAS: Final = 256
"""Most replicas of one stage."""
STAGES: Final[tuple[StageName, ...]] = ("thinker", "talker", "token2wav")

MediaKind = Literal["audio", "image", "video"]
MEDIA_KINDS: Final[tuple[MediaKind, ...]] = ("audio", "image", "video")
MAX_MEDIA_ITEMS: Final = 256
"""Most sounds, pictures and videos of one request, whatever the configuration allows."""

FinishReason = Literal["stop", "length"]
"""Why a token stream ended: an end token was sampled, or the limit on tokens was reached."""

RequestId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+\Z")]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
PositiveCount = Annotated[int, Meta(ge=1, lt=2**31)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]
Text = Annotated[str, Meta(max_length=4096)]
AddressText = Annotated[str, Meta(min_length=1, max_length=1024)]
TraceParent = Annotated[
    str,
    Meta(
        min_length=55,
        max_length=55,
        pattern=r"^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z",
    ),
]
"""A span, in the form of W3C's header ``traceparent``: version, trace, span, flags."""


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
    temperature: Annotated[float, Meta(ge=0, le=10)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=2**20)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0


class SpeechSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the talker and token2wav need to know of a request.

    Attributes:
        speaker: Name of a voice in the checkpoint.
        sampling: How codec tokens are drawn.
        seed: Seeds the talker's draws and the initial noise of token2wav.
        streaming: Send audio in chunks while the talker talks; else in one piece at the end, which
            equals the reference's waveform.
    """

    speaker: Name
    sampling: Sampling
    seed: Seed
    streaming: bool = True


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
        codec_token_ids: The codec tokens that came, without the end token.
        finish_reason: Why they ended; none if more are to be drawn.
        chunks: Chunks of audio that came; they are not made again.
    """

    codec_token_ids: Annotated[list[TokenId], Meta(max_length=65_536)] = []
    finish_reason: FinishReason | None = None
    chunks: Count = 0


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the gateway holds of a request that is resumed: nothing of it is drawn again.

    Attributes:
        text_token_ids: The text tokens that came, the end token included.
        finish_reason: Why they ended; none if more are to be drawn.
        speech: The same of its speech; none for an answer in text only.
    """

    text_token_ids: Annotated[list[TokenId], Meta(max_length=65_536)] = []
    finish_reason: FinishReason | None = None
    speech: ResumedSpeech | None = None


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The replicas that serve a request, by the names they have drawn; addresses never come from requests.

    Attributes:
        thinker: Of the thinker.
        talker: Of the talker; none for an answer in text only.
        token2wav: Of token2wav; none for an answer in text only.
    """

    thinker: Name
    talker: Name | None = None
    token2wav: Name | None = None

    def replica(self, stage: "StageName") -> str | None:
        """Which replica of a stage serves the request; none if no replica does."""
        name: str | None = getattr(self, stage)
        return name


class ThinkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="think"):
    """Gateway to thinker: answer this prompt.

    Attributes:
        request_id: Chosen by the gateway, unique among all living requests.
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
        route: Who serves the request; without it, it goes nowhere but to the thinker.
    """

    request_id: RequestId
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]
    sampling: Sampling
    seed: Seed
    priority: Priority = 0
    speech: SpeechSettings | None = None
    media: Annotated[list[MediaItem], Meta(max_length=MAX_MEDIA_ITEMS)] = []
    use_audio_in_video: bool = False
    traceparent: TraceParent | None = None
    resume: Resume | None = None
    route: Route | None = None


class SpeechStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="speech_start"):
    """Thinker to talker: rows of a new request will follow.

    Attributes:
        request_id: As in :class:`ThinkRequest`.
        prompt_tokens: Length of the thinker's prompt, n, every placeholder replaced.  The talker's own
            prompt is n + 2 positions: the prompt, the voice's start token and the first token of the reply.
            Where text and speech have both ended nobody needs it, and it counts placeholders as one token.
        priority: As in :class:`ThinkRequest`.
        speech: The settings, unchanged.
        traceparent: As in :class:`ThinkRequest`.
        resume: What is there of the speech already; none for a new request.
        route: As in :class:`ThinkRequest`.
    """

    request_id: RequestId
    prompt_tokens: PositiveCount
    priority: Priority
    speech: SpeechSettings
    traceparent: TraceParent | None = None
    resume: ResumedSpeech | None = None
    route: Route | None = None


class ConditioningRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="rows"):
    """Thinker to talker: the next rows of a request's conditioning track.

    Attributes:
        request_id: As in :class:`ThinkRequest`.
        seq: 0, 1, 2, … per request.
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
        """Check the rows and what comes with them.

        Raises:
            PayloadError: Naming the field that is wrong.
        """
        self.rows.check()
        self.additional.check()


class SynthesisStart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="synthesis_start"
):
    """Talker to token2wav: codec tokens of a new request will follow.

    The fields are those of :class:`SpeechStart`, and

    Attributes:
        chunks_delivered: Chunks of this stream that the client has; the codec tokens come from the start
            all the same.
    """

    request_id: RequestId
    priority: Priority
    speech: SpeechSettings
    traceparent: TraceParent | None = None
    chunks_delivered: Count = 0
    route: Route | None = None


class CodecTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="codec_tokens"):
    """Talker to token2wav: the next codec tokens; 50 make one second of audio.

    Attributes:
        request_id: As in :class:`ThinkRequest`.
        seq: 0, 1, 2, … per request.
        token_ids: Ids of the DiT's code book; the end token is not among them.
        last: No token follows.
    """

    request_id: RequestId
    seq: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=65_536)]
    last: bool = False


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
        request_id: As in :class:`ThinkRequest`.
        seq: 0, 1, 2, … per request.
        token_ids: The tokens.
        finish_reason: Set in the last delta of the request.
        prompt: Set in the first delta of the request.
    """

    request_id: RequestId
    seq: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=65_536)]
    finish_reason: FinishReason | None = None
    prompt: PromptUsage | None = None


class CodecDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="codec"):
    """Talker to gateway: a copy of what went to token2wav, so that the gateway can finish a request.

    Attributes:
        request_id: As in :class:`ThinkRequest`.
        seq: 0, 1, 2, … per request.
        token_ids: The codec tokens, without the end token.
        finish_reason: Set in the last delta of the request.
        conditioned: The talker has all conditioning rows: it needs no thinker any more.
    """

    request_id: RequestId
    seq: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=65_536)]
    finish_reason: FinishReason | None = None
    conditioned: bool = False


class AudioChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="audio"):
    """Token2wav to gateway: the next piece of the waveform.

    Attributes:
        request_id: As in :class:`ThinkRequest`.
        seq: 0, 1, 2, … per request.
        samples: Number of samples at :data:`SAMPLE_RATE`, mono.
        data: float32 in [-1, 1], little-endian, ``4 * samples`` bytes.
        last: No chunk follows.
    """

    request_id: RequestId
    seq: Count
    samples: Count
    data: Blob
    last: bool = False

    def check(self) -> None:
        """Refuse a chunk whose number of samples and bytes do not agree.

        Raises:
            PayloadError: They do not.
        """
        check_tensor("audio", (self.samples,), "float32", self.data)


class RequestFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="failed"):
    """Any stage to gateway: this request cannot go on.

    Attributes:
        request_id: As in :class:`ThinkRequest`.
        stage: Where it failed.
        code: The ``code`` of a class in :mod:`shared.errors`.
        message: What was wrong, in words for the client.
    """

    request_id: RequestId
    stage: StageName
    code: Name
    message: Text


class StageLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stage's checkpoint and engine allow; fixed while the process lives.

    Attributes:
        max_positions: Most positions (prompt + generated) of one request; 0 where it has no meaning.
        speakers: Names of the voices; empty from a stage that does not know them.
    """

    max_positions: Count = 0
    speakers: Annotated[list[Name], Meta(max_length=1024)] = []


class StageLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stage holds at one moment.

    Attributes:
        running: Requests in the engine's batch.
        waiting: Requests that wait for memory, rows or tokens.
        held_bytes: Bytes of rows or codes held for them.
        outbox_bytes: Bytes encoded and not yet taken by the next stage.
        refused: Messages refused since the start.
        steps: Engine steps since the start.
    """

    running: Count = 0
    waiting: Count = 0
    held_bytes: Annotated[int, Meta(ge=0)] = 0
    outbox_bytes: Annotated[int, Meta(ge=0)] = 0
    refused: Annotated[int, Meta(ge=0)] = 0
    steps: Annotated[int, Meta(ge=0)] = 0


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="heartbeat"):
    """Stage to gateway, on the control socket: I am here, ready, and this is what I hold.

    Attributes:
        stage: Which stage.
        pid: Its process id.
        instance: The replica's name, drawn at random when the process starts; process ids are all alike in
            containers.
        inbox: The address by which others reach it.  Where it listens on all addresses of its machine, the
            gateway puts in the one from which the heartbeat came.
        limits: Fixed limits, repeated so that a gateway that starts later learns them.
        load: What it held when its loop last came round.
        peak_memory_bytes: Largest resident set of the process so far.
        busy_s: Seconds since then; large while a long step is computed.
        gateway: The gateway whose requests it takes; none while it knows of none.
        peers: The replicas of the next stage that it can send to.
        draining: It ends soon, and wants nothing new.
    """

    stage: StageName
    pid: PositiveCount
    instance: Name
    inbox: AddressText
    limits: StageLimits
    load: StageLoad
    peak_memory_bytes: Annotated[int, Meta(ge=0)] = 0
    busy_s: Annotated[float, Meta(ge=0)] = 0.0
    gateway: Name | None = None
    peers: Annotated[list[Name], Meta(max_length=MAX_REPLICAS)] = []
    draining: bool = False


class Farewell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="farewell"):
    """Stage to gateway, on the control socket: I end now, whatever of requests is still here."""

    stage: StageName
    instance: Name


class Peers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="peers"):
    """Gateway to stage, on the control socket, in answer to each heartbeat.

    Attributes:
        gateway: The gateway's name, drawn at random when it starts; its requests' ids begin with it.
        replicas: The replicas of the next stage and their addresses.
        released: To one that drains: no request needs it any more.
    """

    gateway: Name
    replicas: Annotated[dict[Name, AddressText], Meta(max_length=MAX_REPLICAS)] = {}
    released: bool = False


class Closing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="closing"):
    """Gateway to stage, on the control socket: I end now; none of my requests lives any more."""


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="abort"):
    """Gateway to stage, on the control socket: drop everything of this request, now and later."""

    request_id: RequestId


class AbortDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="abort_done"):
    """Stage to gateway, on the control socket: nothing of this request is left here."""

    request_id: RequestId
    stage: StageName
    instance: Name


def control_identity(stage: StageName, instance: str) -> str:
    """What a replica goes by on the control socket."""
    return f"{stage}.{instance}"


ThinkerInput = ThinkRequest
TalkerInput = SpeechStart | ConditioningRows
Token2WavInput = SynthesisStart | CodecTokens
StageEvent = TextDelta | CodecDelta | AudioChunk | RequestFailed
ControlToGateway = Heartbeat | AbortDone | Farewell
ControlToStage = Peers | Abort | Closing
