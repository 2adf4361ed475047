"""Frameworks for voice agents, with the examples' agents."""

import wave
from sysconfig import get_path

import pytest

from tests.clients.running import ANSWER, EXAMPLES, HEARD, LONGEST_S, QUIET, SHORTEST_S, TRANSCRIPT, Programs
from tests.support.children import ROOT

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


def is_speech(seconds: float) -> bool:
    return SHORTEST_S < seconds < LONGEST_S


def test_livekit(programs: Programs) -> None:
    said = programs.run("livekit", "livekit_voice.py")
    assert is_speech(said.pop("speech seconds"))
    assert said.pop("streamed") == [TRANSCRIPT] * 2
    assert said == {"chat": ANSWER, "response": ANSWER, "transcript": TRANSCRIPT}


def test_pipecat(programs: Programs) -> None:
    said = programs.run("pipecat", "pipecat_voice.py")
    assert said["streamed"] == {"heard": TRANSCRIPT, "said": "", "seconds": 0, "errors": []}
    assert is_speech(said["bot"].pop("seconds"))
    assert said["bot"] == {"heard": TRANSCRIPT, "said": HEARD, "errors": []}


def test_a_voice_app_of_openai_agents(programs: Programs) -> None:
    question, answer = programs.checkpoint / "starter.wav", programs.folder / "answer.wav"
    example = EXAMPLES / "agents_voice.py"
    programs.output("openai-agents", example, arguments=(str(question), str(answer)))
    with wave.open(str(answer)) as file:
        assert is_speech(file.getnframes() / file.getframerate())


@pytest.mark.parametrize(
    ("client", "program"),
    [
        ("livekit", "livekit_realtime.py"),
        ("pipecat", "pipecat_realtime.py"),
        ("openai-agents", "agents_realtime.py"),
    ],
)
def test_a_user_who_interrupts(programs: Programs, client: str, program: str) -> None:
    questions = [str(programs.checkpoint / "starter.wav")] * 2
    heard = programs.run(client, program, arguments=questions)
    assert (heard["answered"], heard["stopped"], heard["said"][-1]) == (2, 1, HEARD)


@pytest.mark.parametrize(
    ("client", "program"), [("livekit", "livekit_functions.py"), ("openai-agents", "agents_functions.py")]
)
def test_functions_in_realtime_sessions(programs: Programs, client: str, program: str) -> None:
    (city,) = programs.run(client, program)["calls"]
    assert city in {"Paris", "Rome"}


def test_the_ends_of_turns_as_pipecat_hears_them(programs: Programs) -> None:
    found = programs.run("pipecat", "pipecat_smart_turn.py", arguments=[str(ROOT), get_path("purelib")])
    assert max(found["features"]) < 1e-4
    for theirs, ours in found["probabilities"]:
        assert ours == pytest.approx(theirs, abs=1e-4)
    problems = ("cannot be loaded", "cannot be loaded", "is not Smart Turn v3")
    assert len(found["refused"]) == len(problems)
    for problem, text in zip(problems, found["refused"], strict=True):
        assert problem in text


def test_functions_with_pipecat(programs: Programs) -> None:
    called = programs.run("pipecat", "pipecat_functions.py")
    assert called.keys() == {"chat", "response", "realtime"}
    for cities in called.values():
        assert len(cities) == 2
        assert set(cities) <= {"Paris", "Rome"}


def test_a_bot_on_the_telephone(programs: Programs) -> None:
    call = programs.run("pipecat", "pipecat_telephone.py")
    assert call["webhook"] == "wss://tunnel.example.com/ws"
    # The checkpoint was not trained on a telephone's narrow band: it mistakes the numbers.
    assert " plus " in call["said"]
    assert is_speech(call["seconds"])
    assert call["loudest"] > QUIET
