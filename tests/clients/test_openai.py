"""OpenAI's packages: for Python, for Node, and for agents."""

import pytest

from tests.clients.running import ANSWER, HEARD, TRANSCRIPT, Programs, assert_speech

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


def test_the_package_for_python(programs: Programs) -> None:
    said = programs.run("openai", "openai_python.py")
    for name in "speech", "streamed speech", "read", "streamed reading", "realtime speech":
        assert_speech(said.pop(name))
    assert said.pop("structured") in {"even", "odd"}
    assert said.pop("arguments")["city"] in {"Paris", "Rome"}
    assert said.pop("usage") > 1
    assert 0 < said.pop("completion") <= 4
    assert said == {
        "models": ["speaking"],
        **dict.fromkeys(("chat", "stream", "spoken", "streamed transcript", "realtime"), ANSWER),
        **dict.fromkeys(("response", "streamed response"), ANSWER),
        "heard": HEARD,
        "transcript": TRANSCRIPT,
        "function": "weather",
        "after its result": "stop",
    }


def test_the_package_for_node(programs: Programs) -> None:
    said = programs.run("node", "openai_node.mjs")
    for name in "speech", "streamed speech", "read":
        assert_speech(said.pop(name))
    assert said.pop("structured") in {"even", "odd"}
    assert said.pop("arguments")["city"] in {"Paris", "Rome"}
    assert 0 < said.pop("completion") <= 4
    assert said == {
        "models": ["speaking"],
        **dict.fromkeys(("chat", "stream", "collected", "spoken", "streamed transcript"), ANSWER),
        **dict.fromkeys(("response", "streamed response"), ANSWER),
        "transcript": TRANSCRIPT,
        "function": "weather",
    }


def test_agents(programs: Programs) -> None:
    said = programs.run("openai-agents", "openai_agents.py")
    assert len(said["calls"]) == 1
    assert set(said["calls"]) <= {"Paris", "Rome"}
    assert said["after a call"]
    assert said["events"] > 1
    assert [said["answer"], said["streamed"]] == [ANSWER, ANSWER]
    assert said["streamed transcripts"] == [TRANSCRIPT]
    # Which of the two it is, an untrained model cannot know.
    assert said["formed"]
    assert said["by websocket"][0] == ANSWER
    assert said["by websocket"][1]
    assert_speech(said["voice"])
