"""Bodies of requests: what is honoured, what is passed over, what is refused and how."""

import base64
import json
import struct
from typing import Any

import numpy as np
import pytest

from gateway.http.fields import IGNORED, NEUTRAL
from gateway.http.openai.chat_request import ChatAnswerOptions, StreamOptions, read_chat
from gateway.http.openai.speech import read_speech
from gateway.http.openai.strings import MIN_LENGTH, parse
from omnirelay.content import AudioPart, ChatMessage, ImagePart, TextPart, VideoPart
from omnirelay.errors import InvalidRequestError, UnsupportedError, UnsupportedFormatError
from omnirelay.protocol import GenerateRequest, SamplingOverrides

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}


SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"]}
PCM16 = {"type": "input_audio", "input_audio": {"data": "", "format": "pcm16"}}


def said(*parts: Any) -> dict[str, Any]:
    """The field of one message of a user."""
    return {"messages": [{"role": "user", "content": list(parts)}]}


def read(**fields: Any) -> tuple[ChatAnswerOptions, GenerateRequest]:
    body = {"model": "m", "messages": HI, **fields}
    return read_chat(parse(bytearray(json.dumps(body).encode()), 10**6), 100)


def asked(*parts: Any, role: str = "user") -> Any:
    """The gateway's parts of one message."""
    _, request = read(messages=[{"role": role, "content": list(parts)}])
    return request.messages[0].content


def refused(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as raised:
        read(**fields)
    return raised.value


def test_a_plain_chat() -> None:
    options, request = read()
    assert options == ChatAnswerOptions("m", events=False, usage=StreamOptions(), logprobs=False, audio=None)
    assert request == GenerateRequest(messages=[ChatMessage("user", "Hi")], speech=False)
    assert read(stop="")[1] == read(seed=-1)[1] == request
    assert read(seed=-5)[1].seed == 2**63 - 5


def test_every_honoured_field() -> None:
    same: Any = {"min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1, "min_p": 0.1}
    same |= {"presence_penalty": 0.5, "frequency_penalty": -2}
    whole: Any = {"stop": ["END", "."], "chunk_frames": [12, 24], "seed": 7, "priority": -3, "deadline_s": 5}
    options, request = read(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
            *HI,
            {"role": "assistant", "content": "Hello", "refusal": None, "tool_calls": []},
        ],
        modalities=["audio", "text"],
        audio={"voice": {"id": "Ethan"}, "format": "flac"},
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=9,
        max_tokens=9,
        top_k=-1,
        logit_bias={"5": 1, "6": -100},
        logprobs=True,
        top_logprobs=3,
        mm_processor_kwargs={"use_audio_in_video": True},
        codec_sampling={"temperature": 0},
        **same,
        **whole,
    )
    assert options == ChatAnswerOptions(
        "m", events=True, usage=StreamOptions(include_usage=True), logprobs=True, audio="flac"
    )
    bias = {5: 1.0, 6: -100.0}
    assert request == GenerateRequest(
        messages=[
            ChatMessage("system", "Be brief."),
            ChatMessage("system", [TextPart("Be kind.")]),
            ChatMessage("user", "Hi"),
            ChatMessage("assistant", "Hello"),
        ],
        speaker="Ethan",
        text_sampling=SamplingOverrides(max_tokens=9, top_k=0, logit_bias=bias, logprobs=3, **same),
        codec_sampling=SamplingOverrides(temperature=0),
        use_audio_in_video=True,
        **whole,
    )


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type":"object"}'),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "null"}}},
            '{"type":"null"}',
        ),
    ],
)
def test_a_schema_of_the_answer(form: dict[str, Any], schema: str | None) -> None:
    assert read(response_format=form)[1].text_sampling.json_schema == schema


def test_parts_of_every_kind() -> None:
    data = base64.b64encode(b"sound").decode()
    assert asked(
        {"type": "text", "text": "What is it?"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": f"data:audio/mp3;base64,{data}", "format": "mp3"}},
        {"type": "audio_url", "audio_url": {"url": "https://a.example/x"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "high"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    ) == [
        TextPart("What is it?"),
        AudioPart(url=f"data:;base64,{data}"),
        AudioPart(url=f"data:audio/mp3;base64,{data}"),
        AudioPart(url="https://a.example/x"),
        ImagePart(url="data:image/png;base64,AAAA"),
        VideoPart(url="data:video/mp4;base64,AAAA"),
    ]


def test_an_earlier_spoken_answer_is_its_transcript() -> None:
    """As the message of an answer is sent back by those who keep the conversation."""
    audio = {"id": "audio_1", "data": "AAAA", "expires_at": 1, "transcript": "Hello"}
    refusal = {"content": None, "refusal": "Hello"}
    for said in ({"content": None, "audio": audio}, {"content": "", "audio": audio}, refusal):
        answer = {"role": "assistant", "annotations": None, **said}
        assert read(messages=[*HI, answer, *HI])[1].messages[1] == ChatMessage("assistant", "Hello")
    error = refused(messages=[*HI, {"role": "assistant", "audio": {"id": "audio_1"}}])
    assert error.param == "messages[1].audio"
    assert "transcript" in str(error)


def test_no_end_before_the_last_token() -> None:
    assert read(ignore_eos=True, max_tokens=5)[1].text_sampling == SamplingOverrides(
        max_tokens=5, min_tokens=5
    )
    assert read(ignore_eos=True)[1].text_sampling == SamplingOverrides(min_tokens=100)


def test_what_changes_nothing_is_passed_over() -> None:
    harmless = {name: values[0] for name, values in NEUTRAL.items() if values}
    anything = {name: {"any": ["thing"]} for name in IGNORED}
    nothing = {name: None for name in (*NEUTRAL, "temperature", "audio", "modalities", "max_tokens")}
    for fields in (harmless, anything, nothing):
        assert read(**fields) == read()
    assert read(stream_options={"include_usage": True})[1] == read()[1]
    assert read(max_tokens=10.0) == read(max_tokens=10)
    history = {"reasoning_content": "hm", "cache_control": {"type": "ephemeral"}}
    call = {**CALL, "index": 0}
    assert read(messages=[*HI, {"role": "assistant", "tool_calls": [call], **history}]) == read(
        messages=[*HI, {"role": "assistant", "tool_calls": [CALL]}]
    )
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    low = {**image, "image_url": {"url": "data:,", "detail": "low"}}
    plain, named = (
        read(messages=[{"role": "user", "content": [part], **name}])
        for part, name in [(image, {}), (low, {"name": "Bob"})]
    )
    assert named == plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "modalities": ["text", "audio"]}, "n"),
        ({"n": 2, "stream": True, "resumable": True}, "n"),
        (
            {"n": 2, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"resumable": True, "stream": True, "tools": [TOOL]}, "resumable"),
        ({"resumable": True, "stream": True, **SPOKEN, "audio": {"format": "mp3"}}, "resumable"),
        ({"tools": [TOOL], "modalities": ["text", "audio"]}, "tools"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"modalities": []}, "modalities"),
        ({"modalities": ["text", "image"]}, "modalities"),
        ({"modalities": ["text", "audio"], "audio": {"format": "ogg"}}, "audio.format"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (said(PCM16), "messages[0].content[0].input_audio.format"),
    ],
    ids=str,
)
def test_what_is_not_done_is_refused(fields: dict[str, Any], param: str | None) -> None:
    error = refused(**fields)
    assert isinstance(error, UnsupportedError)
    assert not isinstance(error, UnsupportedFormatError)
    assert param is None or error.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"resumable": True}, "resumable"),
        ({"resume": {"request_id": "earlier"}}, "resume"),
        ({"resumable": True, "stream": True, "resume": {"request_id": "earlier", "what": 1}}, "resume.what"),
        ({"resumable": True, "stream": True, "resume": {}}, "resume.request_id"),
        ({"model": 5}, "model"),
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": HI * 2049}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "Hi", "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": ["x"]}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (said({"type": "image_url", "image_url": "data:,"}), "messages[0].content[0].image_url"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"audio": {"voice": "Ethan"}}, "audio"),
        ({"modalities": ["text", "audio"], "audio": {"speed": 2}}, "audio.speed"),
        ({"mm_processor_kwargs": {"fps": 1}}, "mm_processor_kwargs.fps"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repetition_penalty": 10.1}, "repetition_penalty"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"priority": 1001}, "priority"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokns": 5}, "max_tokns"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 2**16}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x" * 257]}, "stop[0]"),
        ({"stop": ["x" * 2**16]}, "stop"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "x" * 2**16}}}},
            "response_format",
        ),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"min_p": 1.1}, "min_p"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"logit_bias": {"five": 1}}, None),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_refused_and_named(fields: dict[str, Any], param: str | None) -> None:
    error = refused(**fields)
    assert type(error) is InvalidRequestError
    assert error.param == param
    assert param is None or param.split("[")[0].split(".")[0] in str(error)


def embeddings() -> str:
    """Rows as vLLM takes them of its callers, in base64."""
    rows = np.full((4, 64), np.nan, np.float32).tobytes()
    return base64.b64encode(struct.pack("<2q", 2**40, -1) + rows).decode()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": embeddings()},
        {"prompt_token_ids": [2**31, -1]},
        {"mm_hashes": ["0"]},
        {"multi_modal_data": {"image": embeddings()}},
        {"multi_modal_uuids": {"image": ["same"]}},
        {"mm_placeholders": {"image": [{"offset": -1, "length": 2**31}]}},
        {"mm_processor_kwargs": {"max_pixels": 2**40}},
        {"media_io_kwargs": {"video": {"num_frames": -1}}},
        said({"type": "image_embeds", "image_embeds": embeddings()}),
        said({"type": "audio_embeds", "audio_embeds": embeddings()}),
        said({"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "same"}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_no_tensor_hash_or_range_of_a_caller_is_taken(fields: dict[str, Any]) -> None:
    assert refused(**fields).code in ("invalid_request", "unsupported")


@pytest.mark.parametrize("size", [3, MIN_LENGTH])
def test_percent_signs_are_not_taken_for_escapes_in_base64(size: int) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "%" * size, "format": "wav"}}
    error = refused(messages=[{"role": "user", "content": [sound]}])
    assert error.param == "messages[0].content[0].input_audio.data"
    assert str(error) == f"{error.param} is not base64"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="the body"):
        read_chat(parse(bytearray(body), 10**6), 100)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (r'\ud83d"}]}', "half of a surrogate pair"),
        (r'\uD83Dx"}]}', "half of a surrogate pair"),
        (r'\\\ud83d\n"}]}', "end of escaped utf-16 surrogate pair"),
        (r'\ud83d\u0041"}]}', "surrogate pair"),
        (r'\ude00 "}]}', "invalid utf-16 surrogate pair"),
        (r"\ud83d", "truncated"),
        (r"\ud83d\ude00", "truncated"),
        (r"\\ud83d", "truncated"),
    ],
)
def test_half_a_character_and_half_a_body_are_told_apart(text: str, problem: str) -> None:
    body = '{"model": "m", "messages": [{"role": "user", "content": "' + text
    with pytest.raises(InvalidRequestError, match=problem):
        read_chat(parse(bytearray(body, "utf-8"), 10**6), 100)


@pytest.mark.parametrize(
    ("value", "count", "problem"),
    [
        ("0,", 2**20, "more than 1048576 values"),
        ("[],", 2**17, "more than 131072 lists, objects and members of objects"),
        ('{"a": 0},', 2**16, "more than 131072 lists, objects and members of objects"),
    ],
)
def test_bodies_that_would_swell_are_refused_before_they_do(value: str, count: int, problem: str) -> None:
    body = json.dumps({"model": "m", "messages": HI, "user": ["?"]}).replace('"?"', value * count + "0")
    with pytest.raises(InvalidRequestError, match=problem):
        read_chat(parse(bytearray(body.encode()), 10**8), 100)


def speak(system_prompt: str | None = "You speak.", **fields: Any) -> Any:
    body = {"model": "m", "input": "Good morning", **fields}
    return read_speech(bytearray(json.dumps(body).encode()), system_prompt)


def test_a_text_to_speak() -> None:
    options, request = speak(voice="Ethan", instructions="Whisper.", response_format="pcm", seed=3)
    assert (options.model, options.format, options.events) == ("m", "pcm16", False)
    assert request.messages == [ChatMessage("system", "You speak. Whisper.")]
    assert (request.say, list(options.rest)) == ("Good morning", [])
    assert (request.speaker, request.seed, request.speech) == ("Ethan", 3, True)
    assert speak(speed=2.5)[0].speed == 2.5
    assert speak(speed=1, stream_format="sse", user="me")[0].events
    assert speak()[0].format == "mp3"
    assert speak(system_prompt=None, instructions="Whisper.")[1].messages[0].content == "Whisper."
    assert speak()[1].messages == []
    options, request = speak(input=" This is one sentence of two.  This is the other one.\n\n")
    assert request.say == "This is one sentence of two."
    assert [each.say for each in options.rest] == ["This is the other one."]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speed": 4.5}, "speed"),
        ({"speed": 0.2}, "speed"),
        ({"response_format": "ogg"}, "response_format"),
        ({"stream_format": "json"}, "stream_format"),
        ({"input": ""}, "input"),
        ({"input": "x" * 32_769}, "input"),
        ({"temperature": 0.5}, "temperature"),
    ],
    ids=str,
)
def test_speech_that_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        speak(**fields)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"logit_bias": {"abc": 1}}, "of 1 to 9 digits"),
        ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "of letters, digits, '_', '.' and '-' only"),
    ],
)
def test_patterns_are_said_in_words(fields: dict[str, Any], problem: str) -> None:
    said = str(refused(**fields))
    assert problem in said
    assert "regex" not in said
