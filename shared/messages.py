"""Every message that crosses a socket between two OmniRelay processes, field by field.

A message is a msgspec struct with a tag; :mod:`shared.wire` turns it into ZeroMQ frames and back.
Tensor bytes never sit inside the header: a field of type :class:`Blob` travels as a frame of its own.

Edges (the direction data flows)::

    gateway   -> thinker    ThinkRequest
    thinker   -> talker     SpeechStart, ConditioningRows
    talker    -> token2wav  SynthesisStart, CodecTokens
    any stage -> gateway    TextDelta, CodecDelta, AudioChunk, RequestFailed
    control, both ways      Heartbeat, AbortDone (stage -> gateway); Abort (gateway -> stage)
"""

import math
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from shared.errors import PayloadError

SAMPLE_RATE: Final = 24_000
"""Samples per second of every waveform, fixed by the model's vocoder."""

StageName = Literal["thinker", "talker", "token2wav"]
HEARTBEAT_SUFFIX: Final = ".heartbeat"
"""On the control socket a stage goes by its name, and its heartbeats by its name with this behind."""
STAGES: Final[tuple[StageName, ...]] = ("thinker", "talker", "token2wav")

FinishReason = Literal["stop", "length"]
"""Why a token stream ended: an end token was sampled, or the limit on tokens was reached."""

ITEM_SIZE: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1}
"""Bytes per element of each dtype that may cross a socket."""

ROW_DTYPES: Final = ("float32", "float16", "bfloat16")
"""Dtypes that conditioning rows may have."""

RequestId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+\Z")]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
PositiveCount = Annotated[int, Meta(ge=1, lt=2**31)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=4096)]


class Blob:
    """Bytes that travel out of band, as a frame of their own, without being copied.

    ``view`` is a contiguous memory view of bytes (format ``B``); after decoding it refers to the
    received frame, which lives as long as the view.
    """

    __slots__ = ("view",)

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        self.view = view if view.format == "B" and view.ndim == 1 else view.cast("B")

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.view.nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blob) and self.view == other.view

    def __hash__(self) -> int:
        return hash(bytes(self.view))

    def __repr__(self) -> str:
        return f"Blob({self.nbytes} bytes)"


def check_tensor(field: str, shape: tuple[int, ...], dtype: str, data: Blob, rank: int | None = None) -> None:
    """Refuse a tensor whose shape, dtype and number of bytes do not agree.

    Args:
        field: Name of the message's field, for the error.
        shape: The shape that the message claims.
        dtype: The dtype that the message claims, a key of :data:`ITEM_SIZE`.
        data: The bytes that came with it.
        rank: The number of dimensions it must have, if only one is right.

    Raises:
        PayloadError: It lies; the message names the part that does.
    """
    if dtype not in ITEM_SIZE:
        raise PayloadError(f"{field}.dtype", f"{dtype!r} is not one of {', '.join(ITEM_SIZE)}")
    if rank is not None and len(shape) != rank:
        raise PayloadError(f"{field}.shape", f"has {len(shape)} dimensions, expected {rank}")
    if any(size < 0 for size in shape):
        raise PayloadError(f"{field}.shape", f"has a negative size: {list(shape)}")
    expected = math.prod(shape) * ITEM_SIZE[dtype]
    if expected != data.nbytes:
        raise PayloadError(
            f"{field}.data",
            f"holds {data.nbytes} bytes, but shape {list(shape)} of {dtype} needs {expected}",
        )


class PromptEmbedsPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditioning rows: one row per position, last hidden state + text embedding.

    Attributes:
        shape: ``[n, hidden]``: number of rows, width of a row.
        dtype: One of :data:`ROW_DTYPES`; the model's own, nothing is upcast.
        data: ``n * hidden`` elements, row-major, native little-endian bytes.
    """

    shape: tuple[int, int]
    dtype: str
    data: Blob

    def check(self) -> None:
        """Refuse rows that lie about themselves.

        Raises:
            PayloadError: Naming the field that is wrong.
        """
        if self.dtype not in ROW_DTYPES:
            raise PayloadError("rows.dtype", f"{self.dtype!r} is not one of {', '.join(ROW_DTYPES)}")
        check_tensor("rows", self.shape, self.dtype, self.data, rank=2)

    def check_fits(self, width: int, dtype: str) -> None:
        """Refuse rows that are not what the receiving stage takes.

        Raises:
            PayloadError: Naming the field that is wrong.
        """
        if self.shape[1] != width:
            raise PayloadError("rows.shape", f"rows are {self.shape[1]} wide, this stage takes {width}")
        if self.dtype != dtype:
            raise PayloadError("rows.dtype", f"rows are {self.dtype}, this stage takes {dtype}")


class AdditionalInformationEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One named extra: a tensor or a list, exactly one of the two.

    Attributes:
        tensor_data: The tensor's bytes, row-major.
        tensor_shape: Its shape.
        tensor_dtype: Its dtype, a key of :data:`ITEM_SIZE`.
        list_data: A flat list of plain values, at most 65,536 of them.
    """

    tensor_data: Blob | None = None
    tensor_shape: Annotated[tuple[int, ...], Meta(max_length=8)] | None = None
    tensor_dtype: str | None = None
    list_data: Annotated[list[int | float | str | bool | None], Meta(max_length=65_536)] | None = None

    def check(self, field: str) -> None:
        """Refuse an entry that is neither, both, or a tensor that lies.

        Raises:
            PayloadError: Naming the field that is wrong.
        """
        parts = (self.tensor_data, self.tensor_shape, self.tensor_dtype)
        if self.list_data is not None:
            if any(part is not None for part in parts):
                raise PayloadError(field, "holds a list and a tensor, exactly one is allowed")
            return
        if self.tensor_data is None or self.tensor_shape is None or self.tensor_dtype is None:
            raise PayloadError(field, "needs either list_data or all of tensor_data, _shape and _dtype")
        check_tensor(field, self.tensor_shape, self.tensor_dtype, self.tensor_data)


class AdditionalInformationPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Named extras that travel with rows.

    Attributes:
        entries: At most 16, by name.  Known today: ``mrope_positions``, int32 ``[3, n]``, the
            temporal, height and width position id of each row (M-RoPE, Qwen2-VL).
    """

    entries: Annotated[dict[Name, AdditionalInformationEntry], Meta(max_length=16)]

    def check(self) -> None:
        """Check every entry.

        Raises:
            PayloadError: Naming the entry that is wrong.
        """
        for name, entry in self.entries.items():
            entry.check(f"additional.{name}")


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


class ThinkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="think"):
    """Gateway to thinker: answer this prompt.

    Attributes:
        request_id: Chosen by the gateway, unique among all living requests.
        prompt_token_ids: The whole prompt, chat template applied.
        sampling: How text tokens are drawn.
        seed: Seeds the draws.
        priority: Smaller is served first.
        speech: None for an answer in text only.
    """

    request_id: RequestId
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]
    sampling: Sampling
    seed: Seed
    priority: Priority = 0
    speech: SpeechSettings | None = None


class SpeechStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="speech_start"):
    """Thinker to talker: rows of a new request will follow.

    Attributes:
        request_id: As in :class:`ThinkRequest`.
        prompt_tokens: Length of the thinker's prompt, n.  The talker's own prompt is n + 2 positions:
            the prompt, the voice's start token and the first token of the reply.
        priority: As in :class:`ThinkRequest`.
        speech: The settings, unchanged.
    """

    request_id: RequestId
    prompt_tokens: PositiveCount
    priority: Priority
    speech: SpeechSettings


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
    """Talker to token2wav: codec tokens of a new request will follow."""

    request_id: RequestId
    priority: Priority
    speech: SpeechSettings


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


class TextDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="text"):
    """Thinker to gateway: the next text tokens, the end token included.

    Attributes:
        request_id: As in :class:`ThinkRequest`.
        seq: 0, 1, 2, … per request.
        token_ids: The tokens.
        finish_reason: Set in the last delta of the request.
    """

    request_id: RequestId
    seq: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=65_536)]
    finish_reason: FinishReason | None = None


class CodecDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="codec"):
    """Talker to gateway: a copy of what went to token2wav, so that the gateway can finish a request.

    Attributes:
        request_id: As in :class:`ThinkRequest`.
        seq: 0, 1, 2, … per request.
        token_ids: The codec tokens, without the end token.
        finish_reason: Set in the last delta of the request.
    """

    request_id: RequestId
    seq: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=65_536)]
    finish_reason: FinishReason | None = None


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
        instance: Drawn at random when the process starts; process ids are all alike in containers.
        limits: Fixed limits, repeated so that a gateway that starts later learns them.
        load: What it held when its loop last came round.
        peak_memory_bytes: Largest resident set of the process so far.
        busy_s: Seconds since then; large while a long step is computed.
    """

    stage: StageName
    pid: PositiveCount
    instance: Name
    limits: StageLimits
    load: StageLoad
    peak_memory_bytes: Annotated[int, Meta(ge=0)] = 0
    busy_s: Annotated[float, Meta(ge=0)] = 0.0


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="abort"):
    """Gateway to stage, on the control socket: drop everything of this request, now and later."""

    request_id: RequestId


class AbortDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="abort_done"):
    """Stage to gateway, on the control socket: nothing of this request is left here."""

    request_id: RequestId
    stage: StageName


ThinkerInput = ThinkRequest
TalkerInput = SpeechStart | ConditioningRows
Token2WavInput = SynthesisStart | CodecTokens
StageEvent = TextDelta | CodecDelta | AudioChunk | RequestFailed
ControlToGateway = Heartbeat | AbortDone
ControlToStage = Abort

Message = Any
"""Any struct above; sockets are typed by the unions."""
