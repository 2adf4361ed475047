"""Whatever arrives at a decoder, it gives a message or raises MessageError, nothing else."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnirelay.errors import MessageError
from shared.transport.wire import MAX_FRAMES, WIRE_VERSION, Decoder, encode
from tests.shared.strategies import SOCKETS

VERSION = bytes([WIRE_VERSION])
EXAMPLES = settings(deadline=None, max_examples=200)

# Values that a header may hold instead of what it should, as msgpack: some no encoder would write.
odd_values = st.sampled_from(
    [
        b"\xc0",  # nil
        b"\xc1",  # never used
        b"\xc3",  # true
        b"\xcf" + b"\xff" * 8,  # 2^64 - 1
        b"\xd3\x80" + bytes(7),  # -2^63
        b"\xcb\x7f\xf8" + bytes(6),  # NaN
        b"\xcb\x7f\xf0" + bytes(6),  # infinity
        b"\xa2\xed\xa0",  # no UTF-8
        b"\xc4\x01\x00",  # bytes
        b"\xd4\x05\x00",  # an extension
        b"\xd6\xff" + bytes(4),  # a timestamp
        b"\xc7\x0c\xff" + b"\xff" * 12,  # a timestamp out of range
        b"\xc7\x0c\xff" + bytes(4) + b"\x7f" + b"\xff" * 7,  # a timestamp far in the future
        b"\x81\x90\x01",  # a map whose key is a list
        b"\x81\x80\x01",  # a map whose key is a map
        b"\x81\xd4\x05\x00\x01",  # a map whose key is an extension
        b"\x81\xcb\x7f\xf8" + bytes(6) + b"\x01",  # a map whose key is NaN
        b"\x91" * 2000,  # deep and without an end
        b"\x91" * 2000 + b"\x00",  # deep
        b"\xdd" + b"\xff" * 4,  # a list of 2^32 - 1
        b"\xdf" + b"\xff" * 4,  # a map of 2^32 - 1
        b"\x92\x00\x00",  # the first frame, empty
        b"\x92\x00\x10",  # the first frame, of 16 bytes
    ]
) | st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
).map(msgspec.msgpack.encode)


def attempt(decoder: Decoder[Any], frames: list[bytes]) -> object:
    """A message or its refusal; any other exception is the test's failure."""
    try:
        message = decoder.decode(frames)
    except MessageError as error:
        return error
    # What was believed is a whole message: it can be written, and reads the same.
    again = encode(decoder.decode([bytes(frame) for frame in encode(message)]))
    assert [bytes(frame) for frame in again] == [bytes(frame) for frame in encode(message)]
    return message


@st.composite
def mutated(draw: st.DrawFn, messages: st.SearchStrategy[Any]) -> list[bytes]:
    """Frames of a valid message after one to four accidents."""
    frames = [bytes(frame) for frame in encode(draw(messages))]
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, len(frames) - 1))
        frame = frames[index]
        at = draw(st.integers(0, len(frame)))
        match draw(st.sampled_from(["flip", "cut", "insert", "drop", "repeat", "swap", "add"])):
            case "flip" if at < len(frame):
                frames[index] = frame[:at] + bytes([frame[at] ^ draw(st.integers(1, 255))]) + frame[at + 1 :]
            case "cut":
                frames[index] = frame[:at] + frame[at + draw(st.integers(1, 9)) :]
            case "insert":
                frames[index] = frame[:at] + draw(st.binary(min_size=1, max_size=9)) + frame[at:]
            case "drop" if len(frames) > 1:
                del frames[index]
            case "repeat":
                frames.insert(index, frame)
            case "swap":
                frames[0], frames[index] = frames[index], frames[0]
            case "add":
                frames.append(draw(st.binary(max_size=20)))
    return frames


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything within a header."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += leaves(inner, (*path, key))
    return found


@st.composite
def with_odd_values(draw: st.DrawFn, messages: st.SearchStrategy[Any]) -> list[bytes]:
    """Frames of a message in whose header one or two values were replaced, or named otherwise."""
    header, *blobs = [bytes(frame) for frame in encode(draw(messages))]
    values = msgspec.msgpack.decode(header[1:])
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(leaves(values)))
        odd = msgspec.Raw(draw(odd_values))
        if not path:
            values = odd
            break
        parent = values
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = odd
        if isinstance(parent, dict) and draw(st.integers(0, 9)) == 0:
            parent[draw(st.text(max_size=9))] = parent.pop(path[-1])
    return [VERSION + msgspec.msgpack.encode(values), *blobs]


@pytest.mark.parametrize("socket", SOCKETS)
def test_random_frames_are_refused_as_a_message(socket):
    decoder: Decoder[Any] = Decoder(SOCKETS[socket][0])
    refused = []

    @given(frames=st.lists(st.binary(max_size=80), max_size=MAX_FRAMES + 2))
    @EXAMPLES
    def check(frames: list[bytes]) -> None:
        refused.append(attempt(decoder, frames))
        refused.append(attempt(decoder, [VERSION + b"".join(frames), *frames]))

    check()
    # A message is not found by chance.
    assert all(isinstance(outcome, MessageError) for outcome in refused)


@pytest.mark.parametrize("socket", SOCKETS)
def test_a_damaged_message_is_refused_or_still_a_message(socket):
    union, messages = SOCKETS[socket]
    decoder: Decoder[Any] = Decoder(union)
    outcomes = []

    @given(frames=mutated(messages))
    @EXAMPLES
    def check(frames: list[bytes]) -> None:
        outcomes.append(attempt(decoder, frames))

    check()
    assert any(isinstance(outcome, MessageError) for outcome in outcomes)


@pytest.mark.parametrize("socket", SOCKETS)
def test_an_odd_value_in_any_place_is_refused_or_still_a_message(socket):
    union, messages = SOCKETS[socket]
    decoder: Decoder[Any] = Decoder(union)
    outcomes = []

    @given(frames=with_odd_values(messages))
    @EXAMPLES
    def check(frames: list[bytes]) -> None:
        outcomes.append(attempt(decoder, frames))

    check()
    assert any(isinstance(outcome, MessageError) for outcome in outcomes)


@pytest.mark.parametrize("socket", SOCKETS)
def test_every_truncation_is_refused(socket):
    union, messages = SOCKETS[socket]
    decoder: Decoder[Any] = Decoder(union)

    @given(message=messages)
    @settings(deadline=None, max_examples=10)
    def check(message: Any) -> None:
        frames = [bytes(frame) for frame in encode(message)]
        for length in range(len(frames)):
            with pytest.raises(MessageError):
                decoder.decode(frames[:length])
        for index, frame in enumerate(frames):
            for length in range(len(frame)):
                with pytest.raises(MessageError):
                    decoder.decode([*frames[:index], frame[:length], *frames[index + 1 :]])

    check()
