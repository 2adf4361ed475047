"""What a program may pass to ``chat``, how it finds out, and reports of a gateway that knows more than it."""

import base64
import inspect
import pydoc
from typing import Any

import msgspec
import pytest

import omnirelay
from omnirelay import (
    AsyncClient,
    AudioPart,
    ChatMessage,
    Client,
    GenerateRequest,
    ImagePart,
    SamplingOverrides,
    TextPart,
    build_request,
)
from omnirelay.errors import InvalidRequestError, MediaError
from omnirelay.status import StageLimits, StageLoad, StatusReport

PARTS: list[dict[str, Any]] = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "auto"}},
    {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}},
]


def test_both_clients_take_the_options_of_a_request_and_show_them() -> None:
    options = list(inspect.signature(build_request).parameters.values())
    for client in (Client, AsyncClient):
        first, *shown = inspect.signature(client.chat).parameters.values()
        assert (first.name, shown) == ("self", options)
        text = pydoc.plain(pydoc.render_doc(client.chat))
        assert "**" not in text
        assert all(f"{option.name}: " in text for option in options)
    fields = set(GenerateRequest.__struct_fields__) - {"messages", "prompt_text", "prompt_token_ids"}
    # The clients' own affair.
    fields -= {"resumable", "resume"}
    assert fields < {option.name for option in options}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("top_k", r"did you mean text_sampling=SamplingOverrides\(top_k=\.\.\.\)"),
        ("max_new_tokens", r"did you mean max_tokens=\.\.\."),
        ("min_p", r"or codec_sampling=SamplingOverrides\(min_p=\.\.\.\) for the speech"),
        ("image", r"did you mean images\?"),
        ("voices", r"did you mean voice\?"),
        ("stream", r"did you mean streaming\?"),
        ("xyz", r"the options are system, history, .* say$"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_one(kind: Any, option: str, told: str) -> None:
    # It is refused before the client is looked at.
    with pytest.raises(TypeError, match=rf"no option '{option}'; .*{told}"):
        kind.chat(object(), "Hi", **{option: 1})


def test_messages_may_be_dicts_as_in_the_openai_api() -> None:
    own = ChatMessage("assistant", "A cat.")
    request = build_request(
        [{"role": "user", "content": PARTS}, own, {"role": "user", "content": "Why?"}], system="Be brief."
    )
    system, user, *rest = request.messages
    assert system == ChatMessage("system", "Be brief.")
    assert user == ChatMessage(
        "user",
        [
            TextPart("What is this?"),
            ImagePart(url="data:image/png;base64,AAAA"),
            AudioPart(data=memoryview(b"RIFF")),
        ],
    )
    assert rest == [own, ChatMessage("user", "Why?")]
    mixed = build_request([{"role": "user", "content": [PARTS[0], ImagePart(url="data:,x")]}])
    assert mixed.messages == [ChatMessage("user", [TextPart("What is this?"), ImagePart(url="data:,x")])]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("Hi", r"messages\[0\]: Expected `object`, got `str`"),
        ({"role": "user"}, r"messages\[0\]: Object missing required field `content`"),
        ({"role": "tool", "content": "x"}, r"messages\[0\]: Invalid enum value 'tool'"),
        (
            {"role": "user", "content": "x", "name": "y"},
            r"messages\[0\]: Object contains unknown field `name`",
        ),
        (
            {"role": "user", "content": [{"type": "image"}]},
            r"messages\[0\]\.content\[0\]: Invalid value 'image'",
        ),
        (
            {"role": "user", "content": [{**PARTS[1], "x": 1}]},
            r"content\[0\]: Object contains unknown field `x`",
        ),
    ],
)
def test_a_dict_that_is_no_message_is_refused_with_its_place(message: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        build_request([message])


def test_audio_that_is_not_base64_is_refused() -> None:
    part = {"type": "input_audio", "input_audio": {"data": "=?", "format": "wav"}}
    with pytest.raises(MediaError, match=r"messages\[0\]\.content\[0\]\.input_audio\.data is not base64"):
        build_request([{"role": "user", "content": [part]}])


def test_a_request_carries_its_own_options() -> None:
    request = GenerateRequest(messages=[ChatMessage("user", "Hi")], seed=1)
    assert build_request(request) is request
    every: list[dict[str, Any]] = [{"seed": 2}, {"system": "x"}, {"images": b"x"}, {"streaming": False}]
    for options in every:
        with pytest.raises(TypeError, match="belong into the GenerateRequest"):
            build_request(request, **options)


def test_options_of_the_text_and_the_voice_are_given_directly() -> None:
    schema = {"type": "object"}
    request = build_request(
        "Hi",
        voice="Ethan",
        stop="end",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        json_schema=schema,
        text_sampling=SamplingOverrides(top_k=5),
    )
    assert request.text_sampling == SamplingOverrides(
        max_tokens=9, temperature=0.5, top_p=0.9, json_schema='{"type":"object"}', top_k=5
    )
    assert (request.speaker, request.stop) == ("Ethan", ["end"])
    assert build_request("Hi", speaker="Ethan") == build_request("Hi", voice="Ethan")
    with pytest.raises(TypeError, match="max_tokens given twice"):
        build_request("Hi", max_tokens=9, text_sampling=SamplingOverrides(max_tokens=9))
    with pytest.raises(TypeError, match="voice and speaker are the same option"):
        build_request("Hi", voice="Ethan", speaker="Chelsie")


def test_the_package_shows_its_names() -> None:
    assert {"Client", "AsyncClient"} <= set(dir(omnirelay))


def test_fields_of_a_later_gateway_are_ignored() -> None:
    stage = {
        "name": "talker",
        "replica": "1",
        "pid": 7,
        "state": "ready",
        "limits": {"max_positions": 8, "codec": {"frame_samples": 320, "later": 1}, "later": [1]},
        "load": {"running": 2, "later": {}},
        "later": None,
    }
    gateway = {"pid": 1, "uptime_s": 2.0, "peak_memory_bytes": 3, "model": "m", "later": 1}
    rest = {"requests": {}, "refused": {}, "dropped_events": 0, "later": 1}
    found = msgspec.convert({"gateway": gateway, "stages": [stage], **rest}, StatusReport)
    assert found.stages[0].limits.codec is not None
    assert found.stages[0].limits.codec.frame_samples == 320
    assert isinstance(found.stages[0].limits, StageLimits)
    assert isinstance(found.stages[0].load, StageLoad)
    assert found.stages[0].load.running == 2
