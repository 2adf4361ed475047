"""What stands between a user and many servers: litellm, its proxy, langchain, Open WebUI."""

import pytest

from tests.clients.running import ANSWER, SHORTEST_S, TRANSCRIPT, Programs, assert_speech

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


def test_litellm(programs: Programs) -> None:
    said = programs.run("litellm", "litellm_sdk.py")
    assert_speech(said.pop("speech"))
    assert said == {
        "transcript": TRANSCRIPT,
        **dict.fromkeys(("chat", "as vllm", "stream", "response"), ANSWER),
    }


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


def test_open_webui(programs: Programs) -> None:
    said = programs.run("open-webui", "open_webui_backend.py")
    assert_speech(said.pop("read"), said.pop("rate"))
    call = said.pop("call")
    assert call["understood"] == TRANSCRIPT
    # The checkpoint was not trained with functions: what it says in a call that offers one is not judged.
    assert len(call["answers"]) == len(call["seconds"]) == 2
    assert all(call["answers"])
    assert min(call["seconds"]) > SHORTEST_S
    assert said == {"models": ["speaking"], "chat": ANSWER, "stream": ANSWER, "transcript": TRANSCRIPT}
