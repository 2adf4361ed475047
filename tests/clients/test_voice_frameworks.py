"""Frameworks for voice agents, with the examples' agents."""

import wave

import pytest

from tests.clients.running import ANSWER, HEARD, LONGEST_S, ROOT, SHORTEST_S, TRANSCRIPT, Programs

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


def is_speech(seconds: float) -> bool:
    return SHORTEST_S < seconds < LONGEST_S


def test_livekit(programs: Programs) -> None:
    said = programs.run("livekit", "livekit_voice.py")
    assert is_speech(said.pop("speech seconds"))
    assert is_speech(said.pop("realtime seconds"))
    assert said == {"chat": ANSWER, "transcript": TRANSCRIPT, "realtime": [HEARD]}


def test_pipecat(programs: Programs) -> None:
    said = programs.run("pipecat", "pipecat_voice.py")
    for each in said.values():
        assert is_speech(each.pop("seconds"))
    assert said["bot"] == {"heard": TRANSCRIPT, "said": HEARD, "errors": []}
    assert said["realtime"]["errors"] == []
    assert said["realtime"]["said"] == HEARD


def test_a_voice_app_of_openai_agents(programs: Programs) -> None:
    question, answer = programs.checkpoint / "starter.wav", programs.folder / "answer.wav"
    example = ROOT / "examples" / "voice" / "agents_voice.py"
    programs.output("openai-agents", example, arguments=(str(question), str(answer)))
    with wave.open(str(answer)) as file:
        assert is_speech(file.getnframes() / file.getframerate())
