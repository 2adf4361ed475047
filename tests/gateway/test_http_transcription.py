"""Speech to text and its forms; long strings of bodies, which are read beside them."""

import base64
import io
import json
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.audio import TranslationVerbose

from gateway.http.multipart import Form, read_form
from gateway.http.openai import strings
from gateway.http.openai.chat_request import read_chat
from gateway.http.openai.strings import parse
from gateway.http.openai.transcription import _seconds, read_transcription
from gateway.input.urls import decode_data_url
from omnirelay.content import AudioPart, ChatMessage, ContentPart, MediaPart, TextPart, parts_of
from omnirelay.errors import InvalidRequestError, MediaError, MediaTooLargeError, UnsupportedError
from omnirelay.values import TRANSCRIPTION_PROMPT
from tests.gateway.http_bench import MODEL, HttpBench, events_in, speaking

SAID = "Good morning 😀"


def recording(seconds: float = 0.5) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(round(seconds * 16_000), np.int16), 16_000, format="WAV")
    return file.getvalue()


def test_the_length_of_a_wav_file_is_that_of_its_samples() -> None:
    whole = recording(1.5)
    assert _seconds(whole) == 1.5
    # As encoders write that stream, and do not know it.
    assert _seconds(whole[:40] + b"\xff\xff\xff\xff" + whole[44:]) == 1.5
    assert _seconds(whole[:12] + b"JUNK\xff\xff\xff\xff" + whole[12:]) is None
    assert _seconds(whole[:7] + b"\x7fWAVE" + b"JUNK\0\0\0\0" * 10_000 + whole[12:]) is None
    assert _seconds(whole[:16] + b"\xff\xff\xff\xff" + whole[20:]) is None


@given(st.dictionaries(st.integers(0, 43), st.integers(0, 255), max_size=6), st.binary(max_size=20))
@settings(max_examples=300, deadline=None)
def test_a_damaged_header_never_claims_more_than_there_is(damage: dict[int, int], inserted: bytes) -> None:
    data = bytearray(recording(0.01))
    for place, value in damage.items():
        data[place] = value
    data[12:12] = inserted
    seconds = _seconds(bytes(data))
    assert seconds is None or 0 <= seconds <= len(data)


def form(**fields: Any) -> tuple[str, bytearray]:
    """The content type and the body of a form; ``file`` is one."""
    files: Any = {name: ("a.wav", fields.pop(name)) for name in ("file", "mask") if name in fields}
    request = httpx.Request("POST", "http://a.example", data=fields, files=files)
    return request.headers["content-type"], bytearray(request.read())


async def test_a_recording_becomes_text(web: HttpBench) -> None:
    async with speaking(web, SAID, []):
        create = web.ai.audio.transcriptions.create
        fields: Any = {"model": MODEL, "file": ("a.wav", recording())}
        answer: Any = await create(**fields, temperature=0.2, prompt="Names: Qwen")
        assert answer.text == SAID
        request = web.stages.requests[0]
        assert [bytes(item.data.view) for item in request.media] == [recording()]
        assert (request.sampling.temperature, request.speech) == (0.2, None)
        assert await create(**fields, response_format="text") == SAID + "\n"
        told: Any = await create(**fields, response_format="verbose_json", language="en")
        assert (told.text, told.language, told.duration) == (SAID, "en", 0.5)
        assert (told.usage.type, told.usage.seconds) == ("duration", 0.5)
        stream: Any = await create(**fields, stream=True)
        events = [event async for event in stream]
        assert "".join(event.delta for event in events[:-1]) == SAID
        assert (events[-1].type, events[-1].text) == ("transcript.text.done", SAID)
        with pytest.raises(openai.BadRequestError) as raised:
            await create(**fields, response_format="srt")
        assert (raised.value.code, raised.value.param) == ("unsupported", "response_format")
        with pytest.raises(openai.NotFoundError):
            await create(model="whisper-9", file=("a.wav", recording()))


async def test_a_translation_is_asked_for(web: HttpBench) -> None:
    async with speaking(web, SAID, []):
        form: dict[str, Any] = {"data": {"model": MODEL}, "files": {"file": recording(1.0)}}
        form["data"]["response_format"] = "verbose_json"
        translation = (await web.http.post("/v1/audio/translations", **form)).json()
        assert TranslationVerbose.model_validate(translation).text == SAID
        assert (translation["task"], translation["language"]) == ("translate", "english")
        asked = web.stages.requests[0].prompt_token_ids
        await web.ai.audio.transcriptions.create(model=MODEL, file=("a.wav", recording()))
        assert web.stages.requests[1].prompt_token_ids != asked


async def test_chunks_for_vllms_clients(web: HttpBench) -> None:
    async with speaking(web, SAID, []):
        data = {
            "model": MODEL,
            "stream": "True",
            "stream_include_usage": "True",
            "stream_continuous_usage_stats": "True",
            "max_completion_tokens": "9",
        }
        path, files = "/v1/audio/transcriptions", {"file": recording()}
        answer = await web.http.post(path, data=data, files=files)
        assert answer.text.endswith("\n\ndata: [DONE]\n\n")
        chunks = events_in(answer.text)
        deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas) == SAID
        assert chunks[-1]["usage"]["completion_tokens"] == len(web.encode(SAID))
        assert web.stages.requests[0].sampling.max_tokens == 9


def test_what_the_thinker_is_asked() -> None:
    kind, body = form(model="m", file=b"sound", language="en", prompt="Qwen", temperature="0.5", seed="3")
    options, request = read_transcription(kind, 100, body)
    assert request.messages == [
        ChatMessage("system", "Qwen"),
        ChatMessage("user", [AudioPart(data=memoryview(b"sound")), TextPart(TRANSCRIPTION_PROMPT)]),
    ]
    assert (request.speech, request.seed, request.text_sampling.temperature) == (False, 3, 0.5)
    assert (options.fields.response_format, options.events, options.duration) == ("json", False, None)


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"file": b"x"}, InvalidRequestError, "model"),
        ({"model": "m"}, InvalidRequestError, "file"),
        ({"model": "m", "mask": b"x"}, InvalidRequestError, "file"),
        ({"model": "m", "file": b"x" * 101}, MediaTooLargeError, None),
        ({"model": "m", "file": b"x", "temperature": "hot"}, InvalidRequestError, "temperature"),
        ({"model": "m", "file": b"x", "temperature": "3"}, InvalidRequestError, "temperature"),
        ({"model": "m", "file": b"x", "response_format": "vtt"}, UnsupportedError, "response_format"),
        ({"model": "m", "file": b"x", "response_format": "xml"}, InvalidRequestError, "response_format"),
        (
            {"model": "m", "file": b"x", "timestamp_granularities[]": ["word"]},
            UnsupportedError,
            "timestamp_granularities[]",
        ),
        ({"model": "m", "file": b"x", "mood": "good"}, InvalidRequestError, "mood"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refused_forms(fields: dict[str, Any], kind: type[Exception], param: str | None) -> None:
    if "file" not in fields and "mask" not in fields:
        fields = {**fields, "mask": b""}
    kind_of_form, body = form(**fields)
    with pytest.raises(InvalidRequestError) as raised:
        read_transcription(kind_of_form, 100, body)
    assert type(raised.value) is kind
    assert param is None or raised.value.param == param


@given(st.binary(max_size=300), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_a_file_arrives_whole(data: bytes, piece: int) -> None:
    """Wherever it is cut to be searched."""
    kind, body = form(model="m", **{"x[]": ["1", "2"]}, file=data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.http.body.SEARCHED", piece)
        assert read_form(kind, body) == Form({"model": "m", "x[]": ["1", "2"]}, {"file": data})


TYPE = "multipart/form-data; boundary=x"
HEAD = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n'


@pytest.mark.parametrize(
    ("kind", "body", "problem"),
    [
        ("", b"", "send the file as multipart"),
        ("application/json", b"{}", "send the file as multipart"),
        ("multipart/form-data", b"", "with its boundary"),
        (TYPE + "y" * 70, b"", "1 to 70"),
        (TYPE, b"", "before its last boundary"),
        (TYPE, HEAD + b"1", "before its last boundary"),
        (TYPE, HEAD + b"1\r\n--x", "no headers"),
        (TYPE, b"--x\r\n" + b"y" * 5000 + b"\r\n\r\n1\r\n--x--", "no headers within"),
        (TYPE, b"--x\r\nA: b\r\n\r\n1\r\n--x--", "has no name"),
        (TYPE, (HEAD + b"1\r\n") * 2 + b"--x--", "'a' twice"),
        (TYPE, HEAD + b"\xff\r\n--x--", "not UTF-8"),
        (TYPE, HEAD + b"y" * 70_000 + b"\r\n--x--", "more than 65536"),
        (TYPE, HEAD.replace(b'name="a"', b'name*="x"; name*0="y"') + b"1\r\n--x--", "has no name"),
        (TYPE, HEAD.replace(b'"a"', b'"a') + b"1\r\n--x--", "cannot be read"),
        (TYPE + ";" * 31_000 + "x", b"", "cannot be read"),
        (TYPE + "; a=b" * 6_000, b"", "before its last boundary"),
        (TYPE, (HEAD.replace(b'"a"', b'"a[]"') + b"1\r\n") * 66, "64 parts"),
    ],
)
def test_what_is_no_form_is_refused(kind: str, body: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        read_form(kind, bytearray(body))


def test_names_are_quoted_or_not() -> None:
    head = (
        b'--x\r\ncontent-disposition: form-data ; NAME = "a \\"b\\"; c" ; filename*=UTF-8\'\'%e2.wav;\r\n\r\n'
    )
    body = head + b"1\r\n" + HEAD.replace(b'"a"', b"a") + b"2\r\n--x--"
    form = read_form('Multipart/Form-Data ;charset=utf-8; boundary="x";', bytearray(body))
    assert form == Form({"a": "2"}, {'a "b"; c': b"1"})


def test_a_deep_value_is_refused() -> None:
    body = HEAD.replace(b'"a"', b'"temperature"') + b"[" * 60_000 + b"\r\n--x--"
    with pytest.raises(InvalidRequestError, match="temperature"):
        read_transcription(TYPE, 100, bytearray(body))


@given(st.lists(st.sampled_from([b"--x", b"\r\n", b"--", b"a", HEAD, b"\r\n\r\n", b"\xff"]), max_size=12))
@settings(max_examples=100, deadline=None)
def test_anything_is_a_form_or_refused(pieces: list[bytes]) -> None:
    with suppress(InvalidRequestError):
        read_form(TYPE, bytearray(b"".join(pieces)))


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


def read(messages: Any, limit: int = MAX_BYTES, escaped: bool = True) -> list[ChatMessage]:
    body = json.dumps({"model": "m", "messages": messages}, ensure_ascii=escaped).encode()
    return read_chat(parse(bytearray(body), limit), 100)[1].messages


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
    whole = read(messages, escaped=escaped)
    with pytest.MonkeyPatch.context() as patch:
        # Longer than all names of fields.
        patch.setattr(strings, "MIN_LENGTH", 12)
        patch.setattr(strings, "PIECE_CHARACTERS", 16)
        patch.setattr("gateway.http.body.SEARCHED", 16)
        short = read(messages, escaped=escaped)
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
    return parts_of(read([{"role": "user", "content": [part]}], 10**6)[0])[0]


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
    [message] = read([{"role": "user", "content": parts}], limit=len(LARGE) - 3)
    assert getattr(parts_of(message)[0], "url", None) == url


def test_a_long_text_that_is_no_text_is_refused() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "' + b"\xff" * 100_000 + b'"}]}'
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        read_chat(parse(bytearray(body), 10**6), 100)
