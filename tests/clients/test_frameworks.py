"""Libraries that stand between a program and many servers: litellm, its proxy, langchain."""

import pytest

from tests.clients.running import ANSWER, TRANSCRIPT, Programs, assert_speech

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


def test_litellm(programs: Programs) -> None:
    said = programs.run("litellm", "litellm_sdk.py")
    assert_speech(said.pop("speech"))
    assert said == {"transcript": TRANSCRIPT, **dict.fromkeys(("chat", "stream", "response"), ANSWER)}


def test_the_proxy_of_litellm(programs: Programs) -> None:
    said = programs.run("litellm", "litellm_proxy.py")
    assert_speech(said.pop("speech"))
    assert_speech(said.pop("read"))
    assert said == {
        "transcript": TRANSCRIPT,
        **dict.fromkeys(("chat", "stream", "spoken", "response"), ANSWER),
    }


def test_langchain(programs: Programs) -> None:
    said = programs.run("langchain", "langchain_chat.py")
    assert said.pop("structured") in {"even", "odd"}
    assert said.pop("arguments")["city"] in {"Paris", "Rome"}
    assert said == {"chat": ANSWER, "stream": ANSWER, "function": "weather"}
