"""Whatever a realtime client says is either understood or refused with an error that is meant for it."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from gateway.fairness.memory_budget import ClientBudget, MemoryBudget
from gateway.http.fields import convert_given
from gateway.http.realtime.conversation import MAX_ITEMS, RealtimeConversation
from gateway.http.realtime.events import _KINDS, EventError, ResponseOptions, read_event
from gateway.http.realtime.input.audio import InputAudio
from gateway.http.realtime.input.transcription import read_transcription
from gateway.http.realtime.items import BYTES_PER_S, HEADER_BYTES, Item, messages_of, read_item
from gateway.http.realtime.settings import NEUTRAL, Settings
from omnirelay.content import AudioPart, TextPart
from omnirelay.errors import BusyError, InvalidRequestError, MediaTooLargeError, OmniRelayError
from shared.config import MediaConfig

NAMES = st.sampled_from(
    ["type", "role", "content", "audio", "text", "input", "output", "voice", "format", "turn_detection", "id"]
)
WORDS = st.sampled_from(
    ["message", "user", "assistant", "input_text", "input_audio", "input_image", "AAAA", "?"]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.sampled_from([*NEUTRAL]), inner),
    max_leaves=12,
)


def held(limit: int = 10**9) -> ClientBudget:
    return MemoryBudget(limit, lambda: 100).of("")


@given(st.text(max_size=40))
def test_any_text(text: str) -> None:
    with pytest.raises(EventError):
        read_event(text)


@given(st.sampled_from([*_KINDS]), st.dictionaries(NAMES | st.just("item_id"), JSON), st.text(max_size=9))
def test_any_fields(kind: str, fields: dict[str, Any], name: str) -> None:
    try:
        told = read_event(json.dumps({**fields, "type": kind, "event_id": name})).event_id
    except EventError as error:
        told = error.event_id
    assert told == name


SETTINGS = ["instructions", "temperature", "tools", "tool_choice", "input_audio_transcription", *NEUTRAL]


@given(st.dictionaries(NAMES | st.sampled_from(SETTINGS), JSON))
def test_any_settings(values: dict[str, Any]) -> None:
    try:
        settings = Settings().changed(values, "session", lambda _: None, lambda _: None)
    except InvalidRequestError:
        return
    assert isinstance(settings.speech, bool)
    listening = settings.shown("sess_1", "model")["audio"]["input"]
    rules = to_builtins(settings.turns) or {}
    assert (listening["turn_detection"] or {}) == {
        name: each for name, each in rules.items() if each is not None
    }


@given(st.dictionaries(NAMES, JSON), st.sampled_from(["user", "assistant", "system"]))
def test_any_item(values: dict[str, Any], role: str) -> None:
    try:
        item = read_item({**values, "role": role, "type": "message"}, "item")
    except InvalidRequestError:
        return
    assert item.parts
    assert messages_of([item])[0].role == role


@given(
    st.dictionaries(st.sampled_from(["id", "name", "arguments", "call_id", "output"]), JSON),
    st.sampled_from(["function_call", "function_call_output"]),
)
def test_any_item_of_a_call(values: dict[str, Any], kind: str) -> None:
    try:
        item = read_item({**values, "type": kind}, "item")
    except InvalidRequestError:
        return
    assert item.shown()["type"] == kind
    assert item.weight > 0


@given(st.lists(st.integers(0, 3000), max_size=12), st.integers(1, 8000))
def test_what_is_appended_is_committed_or_refused(sizes: list[int], limit: int) -> None:
    room = held()
    audio = InputAudio(MediaConfig(max_audio_seconds=limit / BYTES_PER_S), room)
    kept = b""
    for at, size in enumerate(sizes):
        piece = bytes([at + 1]) * size
        try:
            audio.append(piece)
        except MediaTooLargeError:
            assert len(kept) + size > math.floor(limit / BYTES_PER_S * BYTES_PER_S)
        else:
            kept += piece
        assert room.budget.total == len(kept)
    if not kept or len(kept) % 2:
        with pytest.raises(InvalidRequestError):
            audio.commit()
        audio.clear()
    else:
        wav, hold = audio.commit()
        assert bytes(wav[HEADER_BYTES:]) == kept
        hold.release()
    assert room.budget.total == 0


@given(st.lists(st.sampled_from(["text", "sound", "drop"]), max_size=30))
def test_a_conversation_always_fits_into_a_request(steps: list[str]) -> None:
    room = held(5000)
    media = MediaConfig(max_audios=2, max_request_bytes=1000, max_item_bytes=1000)
    conversation = RealtimeConversation(media, room)
    items: list[Item] = []
    for step in steps:
        if step == "drop" and items:
            conversation.remove(items.pop(0).id)
            continue
        part = AudioPart(data=memoryview(bytes(300))) if step == "sound" else TextPart("x" * 100)
        item = Item("user", [part], [])
        assert conversation.add(item) == (items[-1].id if items else None)
        items.append(item)
        forgotten = conversation.make_room()
        assert forgotten == items[: len(forgotten)]
        items = items[len(forgotten) :]
        assert len(conversation.messages()) == len(items) <= MAX_ITEMS
        assert room.budget.total == sum(each.weight for each in items) <= 1000
        assert sum(isinstance(each.parts[0], AudioPart) for each in items) <= 2
    conversation.clear()
    assert room.budget.total == 0


def test_no_more_is_kept_than_there_is_room_for_all() -> None:
    room = held(500)
    first, second = RealtimeConversation(MediaConfig(), room), RealtimeConversation(MediaConfig(), room)
    first.add(Item("user", [TextPart("x" * 400)], []))
    with pytest.raises(BusyError):
        second.add(Item("user", [TextPart("x" * 400)], []))
    with pytest.raises(OmniRelayError):
        first.get("nobody")
    first.clear()
    second.add(Item("user", [TextPart("x" * 400)], []))
    assert room.budget.total == 400


def test_what_is_kept_of_an_item_is_weighed_and_nothing_else_is_kept() -> None:
    long = "x" * 100_000
    typed = read_item(
        {"role": "user", "content": [{"type": "input_text", "text": "hi", "transcript": long}]}, "item"
    )
    assert typed.shown()["content"] == [{"type": "input_text", "text": "hi"}]
    said = read_item({"role": "assistant", "content": [{"type": "output_audio", "transcript": long}]}, "item")
    assert said.shown()["content"] == [{"type": "output_audio", "transcript": long}]
    output = {"type": "function_call_output", "call_id": "a", "output": long}
    for item in (said, read_item(output, "item")):
        assert item.weight >= 2 * len(long)
    for name in ("object", "status"):
        with pytest.raises(InvalidRequestError, match=name):
            read_item({**output, name: long}, "item")


def test_a_session_shows_no_field_that_was_not_set() -> None:
    def names(value: Any) -> set[str]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        unset = {name for name, each in value.items() if each is None} if isinstance(value, dict) else set()
        return unset.union(*map(names, inner))

    function = {"type": "function", "name": "weather"}
    given = {"tools": [function], "audio": {"input": {"transcription": {"model": "whisper-1"}}}}
    settings = Settings().changed(given, "session", lambda _: None, lambda _: None)
    shown = settings.shown("sess_1", "model")
    assert names(shown) == set()
    assert shown["tools"] == [function]
    off = settings.changed({"turn_detection": None}, "session", lambda _: None, lambda _: None)
    assert names(off.shown("sess_1", "model")) == {"turn_detection"}


def test_metadata_of_a_response_are_bounded_as_openai_bounds_them() -> None:
    for metadata in ({"a": "x" * 513}, {"a" * 65: "x"}, {str(number): "x" for number in range(17)}):
        with pytest.raises(InvalidRequestError):
            convert_given({"metadata": metadata}, ResponseOptions, "response")
    kept = {"a" * 64: "x" * 512}
    assert convert_given({"metadata": kept}, ResponseOptions, "response").metadata == kept


def test_labels_of_a_transcription_are_bounded_and_only_those_given_are_shown() -> None:
    rules = read_transcription({"model": "whisper-1", "language": None}, "session")
    assert to_builtins(rules) == {"model": "whisper-1"}
    for values in ({"model": "x" * 129}, {"delay": "x" * 129}, {"languages": ["de"] * 65}):
        with pytest.raises(InvalidRequestError, match="length"):
            read_transcription(values, "session")
