"""The wire format: what was encoded comes back, without a copy; all else is refused in one way."""

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from omnirelay.errors import MessageError, PayloadError, VersionError
from shared.messages import (
    Abort,
    AudioChunk,
    CodecTokens,
    ConditioningRows,
    RequestFailed,
    Resume,
    ResumedSpeech,
    StageEvent,
    TalkerInput,
    TextDelta,
    TextSampling,
    ThinkerInput,
    ThinkRequest,
    Token2WavInput,
)
from shared.messages.payloads import (
    AdditionalInformationEntry,
    AdditionalInformationPayload,
    Blob,
    PromptEmbedsPayload,
)
from shared.transport.wire import MAX_FRAMES, MAX_HEADER_BYTES, WIRE_VERSION, Decoder, Frame, encode
from tests.shared.strategies import SOCKETS

VERSION = bytes([WIRE_VERSION])


def pack(header: Any) -> bytes:
    return VERSION + msgspec.msgpack.encode(header)


def audio(samples: int = 4, request_id: str = "a") -> AudioChunk:
    return AudioChunk(request_id=request_id, seq=0, samples=samples, data=Blob(bytes(range(4 * samples))))


def audio_header(**changes: Any) -> dict[str, Any]:
    return {"type": "audio", "request_id": "a", "seq": 0, "samples": 4, "data": [0, 16]} | changes


def rows(shape: tuple[int, int] = (2, 3), dtype: str = "float32", nbytes: int = 24) -> ConditioningRows:
    positions = AdditionalInformationEntry(
        tensor_data=Blob(bytes(24)), tensor_shape=(3, 2), tensor_dtype="int32"
    )
    return ConditioningRows(
        request_id="a",
        seq=0,
        start=0,
        rows=PromptEmbedsPayload(shape=shape, dtype=dtype, data=Blob(bytes(nbytes))),
        additional=AdditionalInformationPayload(entries={"mrope_positions": positions}),
    )


def shares_memory(blob: Blob, frame: Frame | bytearray) -> bool:
    return np.shares_memory(np.frombuffer(blob.view, np.uint8), np.frombuffer(frame, np.uint8))


@pytest.mark.parametrize("socket", SOCKETS)
def test_every_message_comes_back_equal(socket):
    union, messages = SOCKETS[socket]
    decoder: Decoder[Any] = Decoder(union)

    @given(message=messages)
    @settings(deadline=None, max_examples=120)
    def check(message: Any) -> None:
        frames = encode(message)
        decoded = decoder.decode([bytes(frame) for frame in frames])
        assert type(decoded) is type(message)
        assert decoded == message

    check()


def test_blobs_are_copied_neither_by_encoding_nor_by_decoding():
    data = bytearray(4_000_000)
    message = AudioChunk(request_id="a", seq=0, samples=1_000_000, data=Blob(data))
    tracemalloc.start()
    frames = encode(message)
    decoded = Decoder[Any](StageEvent).decode(frames)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert shares_memory(decoded.data, data)
    assert shares_memory(decoded.data, frames[1])
    assert peak < 100_000


def test_blobs_of_several_fields_refer_to_their_own_frames():
    message = rows()
    frames = [bytes(frame) for frame in encode(message)]
    decoded = Decoder[Any](TalkerInput).decode(frames)
    positions = decoded.additional.entries["mrope_positions"].tensor_data
    assert len(frames) == 3
    assert shares_memory(decoded.rows.data, frames[1])
    assert shares_memory(positions, frames[2])


def test_a_decoder_keeps_no_frame_of_a_message():
    decoder = Decoder[Any](StageEvent)
    data = bytearray(16)
    decoder.decode([*encode(audio())[:1], memoryview(data)])
    with pytest.raises(MessageError):
        decoder.decode([pack(audio_header(samples=5)), memoryview(data)])
    data.append(0)  # Raises BufferError while anything refers to it.
    assert len(data) == 17


def test_a_value_without_a_place_in_a_message_is_not_encoded():
    with pytest.raises(NotImplementedError, match="object cannot be in a message"):
        encode([object()])


@pytest.mark.parametrize(
    ("frames", "kind", "problem"),
    [
        ([], MessageError, "without a header"),
        ([b""], MessageError, "without a header"),
        ([VERSION], MessageError, "without a header"),
        ([b"\x00" + pack(audio_header())[1:], bytes(16)], VersionError, "version 0, this build speaks 8"),
        ([b"\x01" + pack(audio_header())[1:], bytes(16)], VersionError, "version 1, this build speaks 8"),
        ([pack(audio_header())[:-1], bytes(16)], MessageError, "truncated"),
        ([pack(audio_header()) + b"\x00", bytes(16)], MessageError, "trailing characters"),
        ([pack(audio_header(type="spam")), bytes(16)], MessageError, "Invalid value 'spam'"),
        ([pack(audio_header(type="think")), bytes(16)], MessageError, "Invalid value 'think'"),
        ([pack({"request_id": "a"})], MessageError, "missing required field `type`"),
        ([pack(audio_header(volume=3)), bytes(16)], MessageError, "unknown field `volume`"),
        ([pack(audio_header(request_id="")), bytes(16)], MessageError, "request_id"),
        ([pack(audio_header(request_id="a/b")), bytes(16)], MessageError, "request_id"),
        ([pack(audio_header(request_id="a\n")), bytes(16)], MessageError, "request_id"),
        ([pack(audio_header(request_id="a" * 65)), bytes(16)], MessageError, "request_id"),
        ([pack(audio_header(seq=-1)), bytes(16)], MessageError, "seq"),
        ([pack(audio_header(seq=2**31)), bytes(16)], MessageError, "seq"),
        ([pack(audio_header(seq=True)), bytes(16)], MessageError, "seq"),
        (
            [pack(audio_header(samples=3)), bytes(16)],
            PayloadError,
            r"audio.data: holds 16 bytes, .* needs 12",
        ),
        ([pack(audio_header())], PayloadError, "frame 0 is missing"),
        ([pack(audio_header()), bytes(15)], PayloadError, "frame 0 holds 15 bytes, not 16"),
        ([pack(audio_header()), bytes(17)], PayloadError, "frame 0 holds 17 bytes, not 16"),
        ([pack(audio_header()), bytes(16), b""], PayloadError, "1 frames that no field refers to"),
        ([pack(audio_header(data=[1, 16])), bytes(16)], PayloadError, "frame 1 is missing"),
        ([pack(audio_header(data=[-1, 16])), bytes(16)], PayloadError, "frame -1 is missing"),
        ([pack(audio_header(data=[2**64 - 1, 16])), bytes(16)], PayloadError, "is missing"),
        ([pack(audio_header(data=[False, 16])), bytes(16)], PayloadError, "index and its size"),
        ([pack(audio_header(data=[0, 16.0])), bytes(16)], PayloadError, "index and its size"),
        ([pack(audio_header(data=[0, 16, 0])), bytes(16)], PayloadError, "index and its size"),
        ([pack(audio_header(data=bytes(16)))], PayloadError, "index and its size"),
        ([pack(audio_header(data=None)), bytes(16)], PayloadError, "index and its size"),
        (
            [pack(audio_header()), *[b""] * MAX_FRAMES],
            MessageError,
            f"message of {MAX_FRAMES + 1} frames, at most {MAX_FRAMES}",
        ),
        ([VERSION + b"\x91" * 100_000], MessageError, "cannot be read"),
        ([VERSION + b"\x81\xa4type\xa1\xff"], MessageError, "cannot be read"),
    ],
)
def test_a_message_that_lies_is_refused_and_says_how(frames, kind, problem):
    with pytest.raises(kind, match=problem):
        Decoder[Any](StageEvent).decode(frames)


@pytest.mark.parametrize("header", [{"type": "x\n18:00:00 INFO all is well"}, {"type": "x" * 10**6}])
def test_what_is_told_of_a_message_has_one_line_and_an_end(header):
    with pytest.raises(MessageError, match="cannot be read") as refusal:
        Decoder[Any](StageEvent).decode([pack(header)])
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 1000


def test_a_frame_named_twice_is_refused():
    header = msgspec.msgpack.decode(encode(rows())[0][1:])
    header["additional"]["entries"]["mrope_positions"]["tensor_data"] = header["rows"]["data"]
    with pytest.raises(PayloadError, match="frame 0 is missing or named twice"):
        Decoder[Any](TalkerInput).decode([pack(header), bytes(24), bytes(24)])


def test_a_refusal_leaves_nothing_behind_for_the_next_message():
    decoder = Decoder[Any](StageEvent)
    with pytest.raises(PayloadError):
        decoder.decode([pack(audio_header()), bytes(16), bytes(16)])
    with pytest.raises(PayloadError, match="frame 0 is missing"):
        decoder.decode([pack(audio_header())])
    assert decoder.decode(encode(audio())) == audio()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (rows(shape=(2, 4)), "rows.data"),
        (rows(shape=(2**31, 2**31)), "rows.data"),
        (rows(shape=(-2, -3)), "rows.shape"),
        (rows(dtype="bfloat16"), "rows.data"),
        (rows(dtype="float64"), "rows.dtype"),
        (rows(dtype="int32"), "rows.dtype"),
        (rows(dtype="object"), "rows.dtype"),
        (rows(nbytes=0), "rows.data"),
    ],
)
def test_rows_that_lie_are_refused_and_the_field_is_named(message, field):
    with pytest.raises(PayloadError) as caught:
        Decoder[Any](TalkerInput).decode(encode(message))
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_a_shape_of_another_rank_is_refused():
    header = msgspec.msgpack.decode(encode(rows())[0][1:])
    for shape in ([6], [1, 2, 3], 6, [2.0, 3.0]):
        header["rows"]["shape"] = shape
        with pytest.raises(MessageError, match="shape"):
            Decoder[Any](TalkerInput).decode([pack(header), bytes(24), bytes(24)])


def test_a_payload_over_the_limit_is_refused_before_it_is_looked_at():
    limit = 64
    decoder = Decoder[Any](StageEvent, max_payload_bytes=limit)
    assert decoder.decode(encode(audio(16))).samples == 16
    with pytest.raises(PayloadError, match="frame 0 holds 68 bytes, at most 64"):
        decoder.decode(encode(audio(17)))
    with pytest.raises(PayloadError, match="frame 0 holds 65 bytes, at most 64"):
        decoder.decode([VERSION + b"not a header at all", bytes(65)])


def test_a_header_over_the_limit_is_refused():
    with pytest.raises(MessageError, match=f"at most {MAX_HEADER_BYTES}"):
        Decoder[Any](StageEvent).decode([VERSION + bytes(MAX_HEADER_BYTES)])


def test_the_longest_legal_prompt_fits_in_a_header():
    message = ThinkRequest(
        request_id="a" * 64, prompt_token_ids=[2**31 - 1] * 2**20, sampling=TextSampling(max_tokens=1), seed=0
    )
    frames = encode(message)
    assert len(frames[0]) <= MAX_HEADER_BYTES
    assert Decoder[Any](ThinkerInput).decode(frames) == message
    longer = msgspec.structs.replace(message, prompt_token_ids=[0] * (2**20 + 1))
    with pytest.raises(MessageError, match="length <= 1048576"):
        Decoder[Any](ThinkerInput).decode(encode(longer))


def test_the_longest_speech_can_be_resumed():
    """All positions that a talker has, in frames of sixteen ids."""
    codes = [2047] * 16 * 65_536
    think = ThinkRequest(
        request_id="a",
        prompt_token_ids=[1],
        sampling=TextSampling(max_tokens=1),
        seed=0,
        resume=Resume(speech=ResumedSpeech(codec_token_ids=codes)),
    )
    assert Decoder[Any](ThinkerInput).decode(encode(think)) == think
    told = CodecTokens(request_id="a", seq=0, token_ids=codes)
    assert Decoder[Any](Token2WavInput).decode(encode(told)) == told


@pytest.mark.parametrize("opcode", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
@pytest.mark.parametrize("field", ["token_ids", "request_id", "spam"])
def test_nothing_is_allocated_on_the_word_of_a_header(opcode, field):
    """A length of 4 GiB elements is announced, and a few bytes follow."""
    start = {"type": "text", "seq": 0}
    body = msgspec.msgpack.encode(start)[1:] + msgspec.msgpack.encode(field) + opcode + b"\xff" * 8
    tracemalloc.start()
    with pytest.raises(MessageError):
        Decoder[Any](StageEvent).decode([VERSION + b"\x83" + body])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_each_socket_takes_only_the_messages_it_declares():
    delta = TextDelta(request_id="a", seq=0, token_ids=[1])
    failed = RequestFailed(request_id="a", stage="talker", code="busy", message="")
    for message in (delta, failed, Abort(request_id="a"), audio()):
        with pytest.raises(MessageError, match=r"Invalid value '(text|failed|abort|audio)'"):
            Decoder[Any](ThinkerInput).decode(encode(message))


# As msgpack: nil, what is never used, true, 2^64 - 1, -2^63, NaN, infinity, no UTF-8, bytes, an extension, a
# timestamp, one out of range, one far in the future, maps whose key is a list, a map, an extension, NaN,
# lists and maps of 2^32 - 1, the first frame, empty, and of 16 bytes.
ODD = """
    c0 c1 c3 cfffffffffffffffff d38000000000000000 cb7ff8000000000000 cb7ff0000000000000 a2eda0 c40100 d40500
    d6ff00000000 c70cffffffffffffffffffffffff c70cff000000007fffffffffffffff 819001 818001 81d4050001
    81cb7ff800000000000001 ddffffffff dfffffffff 920000 920010
"""
ODD_VALUES = [*map(bytes.fromhex, ODD.split()), b"\x91" * 2000, b"\x91" * 2000 + b"\x00"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything within a header."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in leaves(inner, (*path, key)))]


@pytest.mark.parametrize(("message", "union"), [(audio(), StageEvent), (rows(), TalkerInput)])
def test_an_odd_value_in_any_place_is_refused_or_makes_a_whole_message(message, union):
    """What bytes can do besides is ``tests/fuzz/targets/wire.py``'s."""
    header, *blobs = [bytes(frame) for frame in encode(message)]
    decoder = Decoder[Any](union)
    refused = 0
    for path in leaves(msgspec.msgpack.decode(header[1:]))[1:]:
        for odd in ODD_VALUES:
            values = parent = msgspec.msgpack.decode(header[1:])
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = msgspec.Raw(odd)
            try:
                decoded = decoder.decode([pack(values), *blobs])
            except MessageError:
                refused += 1
            else:
                assert decoder.decode([bytes(frame) for frame in encode(decoded)]) == decoded
    assert refused


@pytest.mark.parametrize("socket", SOCKETS)
def test_every_truncation_is_refused(socket):
    union, messages = SOCKETS[socket]
    decoder: Decoder[Any] = Decoder(union)

    @given(message=messages)
    @settings(deadline=None, max_examples=10)
    def check(message: Any) -> None:
        frames = [bytes(frame) for frame in encode(message)]
        short = [frames[:length] for length in range(len(frames))]
        for index, frame in enumerate(frames):
            cut = ([*frames[:index], frame[:size], *frames[index + 1 :]] for size in range(len(frame)))
            short.extend(cut)
        for each in short:
            with pytest.raises(MessageError):
                decoder.decode(each)

    check()
