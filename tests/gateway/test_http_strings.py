"""Long strings are cut out of a body and read beside it; that must not be seen in what is read."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.openai import strings
from gateway.http.openai.chat_request import read_chat
from gateway.http.openai.strings import parse
from gateway.input.urls import decode_data_url
from omnirelay.content import ChatMessage, ContentPart, MediaPart, parts_of
from omnirelay.errors import InvalidRequestError, MediaError

MAX_BYTES = 1000
FILES = st.binary(min_size=1, max_size=MAX_BYTES)
TEXTS = st.text(st.sampled_from('ab"\\/😀\n ') | st.characters(codec="utf-8"), max_size=40)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


PARTS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    TEXTS.map(lambda text: {"type": "text", "text": text}),
    FILES.map(
        lambda data: {"type": "input_audio", "input_audio": {"data": base64_of(data), "format": "wav"}}
    ),
    FILES.map(
        lambda data: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64_of(data)}"}}
    ),
    TEXTS.map(lambda text: {"type": "video_url", "video_url": {"url": text}}),
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS | st.lists(PARTS, max_size=4)}),
    min_size=1,
    max_size=3,
)


def read(messages: Any, escaped: bool = False) -> list[ChatMessage]:
    body = json.dumps({"model": "m", "messages": messages}, ensure_ascii=escaped).encode()
    return read_chat(parse(bytearray(body), MAX_BYTES), 100)[1].messages


def plain(part: ContentPart) -> object:
    """A part, the same whether its file is given or is in a URL."""
    if not isinstance(part, MediaPart):
        return part
    if part.data is not None:
        return type(part), bytes(part.data)
    try:
        return type(part), bytes(decode_data_url("x", part.url or "", MAX_BYTES))
    except MediaError:
        return part


@given(MESSAGES, st.booleans())
@settings(max_examples=150, deadline=None)
def test_cutting_is_not_seen(messages: list[Any], escaped: bool) -> None:
    whole = read(messages, escaped)
    with pytest.MonkeyPatch.context() as patch:
        # Longer than all names of fields.
        patch.setattr(strings, "MIN_LENGTH", 12)
        patch.setattr(strings, "PIECE_CHARACTERS", 16)
        patch.setattr("gateway.http.body.SEARCHED", 16)
        short = read(messages, escaped)
    for one, other in zip(whole, short, strict=True):
        assert [plain(part) for part in parts_of(one)] == [plain(part) for part in parts_of(other)]


@given(st.binary(max_size=200), st.binary(max_size=20))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_cut_without_harm(body: bytes, tail: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strings, "MIN_LENGTH", 4)
        cutter = strings.LongStrings(MAX_BYTES)
        short = bytes(cutter.cut(bytearray(b'{"a": "' + body + b'"}' + tail)))
        restored = short
        for word, found in cutter._found.items():
            restored = restored.replace(word.encode(), bytes(found))
    assert restored == b'{"a": "' + body + b'"}' + tail


LARGE = bytes(range(256)) * 400


def one_part(part: dict[str, Any]) -> ContentPart:
    return parts_of(read_chat_of([{"role": "user", "content": [part]}])[0])[0]


def read_chat_of(messages: Any, limit: int = 10**6) -> list[ChatMessage]:
    body = json.dumps({"model": "m", "messages": messages}).encode()
    return read_chat(parse(bytearray(body), limit), 100)[1].messages


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": base64_of(LARGE), "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": "data:;base64," + base64_of(LARGE), "format": "mp3"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + base64_of(LARGE)}},
        {"type": "image_url", "image_url": {"url": "DATA:image/png;BASE64," + base64_of(LARGE)}},
        {"type": "video_url", "video_url": {"url": "data:;base64," + base64_of(LARGE).rstrip("=")}},
    ],
    ids=lambda part: part["type"],
)
def test_large_files_are_decoded_where_they_are(part: dict[str, Any]) -> None:
    found = one_part(part)
    assert isinstance(found, MediaPart)
    assert (found.url, bytes(found.data or b"")) == (None, LARGE)


@pytest.mark.parametrize(
    "url",
    [
        "data:;base64," + base64_of(LARGE)[:-6] + "?" * 6,
        "data:;base64," + base64_of(LARGE) + "====",
        "data:text/plain," + "x" * 100_000,
        "https://a.example/" + "x" * 100_000,
        "x" * 100_000,
    ],
    ids=["no base64", "padded", "no base64 meant", "https", "nothing"],
)
def test_what_is_not_plain_base64_is_left_to_the_gateway(url: str) -> None:
    found = one_part({"type": "image_url", "image_url": {"url": url}})
    assert isinstance(found, MediaPart)
    assert (found.url, found.data) == (url, None)


def test_files_over_the_limit_are_not_decoded() -> None:
    url = "data:;base64," + base64_of(LARGE)
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    [message] = read_chat_of([{"role": "user", "content": parts}], limit=len(LARGE) - 3)
    assert getattr(parts_of(message)[0], "url", None) == url


def test_a_long_text_stays_a_text() -> None:
    long = "A" * 100_000
    [one, two] = read_chat_of(
        [
            {"role": "user", "content": long},
            {"role": "user", "content": [{"type": "text", "text": long + "😀"}]},
        ]
    )
    assert one.content == long
    assert getattr(parts_of(two)[0], "text", None) == long + "😀"


def test_a_long_text_that_is_no_text_is_refused() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "' + b"\xff" * 100_000 + b'"}]}'
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        read_chat(parse(bytearray(body), 10**6), 100)
