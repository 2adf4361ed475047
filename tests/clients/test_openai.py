"""OpenAI's packages."""

import pytest

from tests.clients.running import ANSWER, HEARD, TRANSCRIPT, Programs, assert_speech

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


def test_the_package_for_python(programs: Programs) -> None:
    said = programs.run("openai", "openai_python.py")
    for name in "speech", "streamed speech", "read", "streamed reading", "realtime speech":
        assert_speech(said.pop(name))
    assert said.pop("structured") in {"even", "odd"}
    assert said.pop("arguments")["city"] in {"Paris", "Rome"}
    assert said.pop("usage") > 1
    assert said == {
        "models": ["speaking"],
        **dict.fromkeys(("chat", "stream", "spoken", "streamed transcript", "realtime"), ANSWER),
        **dict.fromkeys(("response", "streamed response"), ANSWER),
        "heard": HEARD,
        "transcript": TRANSCRIPT,
        "function": "weather",
        "after its result": "stop",
        "completion": 1,
    }
