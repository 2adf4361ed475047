"""``omnirelay.server``: a stack from Python, with the real launcher and gateway and imitated stages."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import wave
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import psutil
import pytest

from omnirelay import ChatMessage
from omnirelay.errors import ConfigError, GatewayUnreachableError, OutputError, RequestError, StageStartError
from omnirelay.server import AsyncOmni, Omni, OmniAnswer
from tests.support.children import Child

LEFT = """
import sys, time
from omnirelay.server import Omni
omni = Omni()
print(*(child.pid for child in __import__("psutil").Process().children(recursive=True)), flush=True)
{then}
"""


def stacks() -> list[psutil.Process]:
    """Launchers of stacks with their configuration in the folder of temporary files, and their processes."""
    launchers = [each for each in psutil.Process().children() if gettempdir() in "".join(each.cmdline()[-1:])]
    return [each for launcher in launchers for each in (launcher, *launcher.children(recursive=True))]


@pytest.fixture
def temporary(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, which holds those of stacks that this test starts."""
    folder = place / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_prompts_are_answered_in_order_and_one_that_fails_harms_no_other(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (temporary / "cat.jpg").write_bytes(b"cat")
    prompts: list[Any] = [
        "Hello",
        {"messages": [{"role": "user", "content": "Hi"}], "voice": "chelsie"},
        {"text": "What is this?", "images": [str(temporary / "cat.jpg")], "speech": False, "seed": 7},
        {"text": "Hi", "images": [str(temporary / "none.jpg")]},
        {"text": "Hi", "voice": "Nobody"},
    ]
    with Omni(voice="Chelsie", gateway={"limits": {"max_active": 2}}) as omni:
        answers = omni.generate(prompts, errors="return", temperature=0, system="Be brief.")
        with pytest.raises(RequestError) as raised:
            omni.generate(prompts[3:])
        with pytest.raises(TypeError, match="txt"):
            omni.generate([{"txt": "Hi"}])
        (again,) = omni.generate("Hello", seed=3)
        first = answers[0]
        assert isinstance(first, OmniAnswer)
        follow = omni.chat("Tell me more", history=first, speech=False).result()
        assert omni.status().ready
        assert omni.transcribe(b"sound") == again.text
    assert raised.value.__notes__ in (
        ["prompt 0 failed, counted from 0"],
        ["prompt 1 failed, counted from 0"],
    )
    texts = [each.text for each in answers if isinstance(each, OmniAnswer)]
    assert texts == [again.text] * 3
    assert [getattr(each, "code", None) for each in answers] == [None] * 3 + [
        "media_invalid",
        "unknown_speaker",
    ]
    third = answers[2]
    assert isinstance(third, OmniAnswer)
    assert first.prompt == "Hello"
    assert first.messages == [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Hello"),
        ChatMessage("assistant", first.text),
    ]
    assert first.done.speaker == "Chelsie"
    assert (third.done.seed, third.waveform) == (7, b"")
    assert follow.done.prompt_tokens > first.done.prompt_tokens
    first.save(temporary / "a.wav")
    with wave.open(str(temporary / "a.wav")) as file:
        assert file.getnframes() == first.audio.size > 0
    assert re.match(
        r'<audio controls src="data:audio/wav;base64,UklGR[^"]+"></audio><p>', first._repr_html_()
    )
    assert third._repr_html_() == f"<p>{third.text}</p>"
    # Nothing is left, and nothing was said.
    assert stacks() == []
    assert sorted(path.name for path in temporary.iterdir()) == ["a.wav", "cat.jpg"]
    assert capsys.readouterr() == ("", "")


async def test_stacks_run_beside_each_other_in_one_event_loop(temporary: Path) -> None:
    async with AsyncOmni(text_only=True, log=temporary / "one.log") as one, AsyncOmni() as two:
        answers = await asyncio.gather(one.generate(["a", "b"], speech=False), two.generate("c"))
        assert [len(each) for each in answers] == [2, 1]
        assert [event async for event in two.chat("Hello")]
        # Plain code in a notebook: a loop runs in its thread.
        with Omni(text_only=True) as three:
            assert three.generate("d", speech=False)[0].text
        assert (await one.status()).gateway.text_only
    assert stacks() == []
    assert "thinker says hello" in (temporary / "one.log").read_text()


def test_a_stack_that_does_not_start_names_its_log(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TALKER", "fail")
    with pytest.raises(StageStartError, match="the talker has no reason to live") as raised:
        Omni()
    (log,) = temporary.glob("omnirelay-*.log")
    assert f"the log of the stack is {log}" in str(raised.value)
    assert "no reason to live" in log.read_text()
    assert stacks() == []
    with pytest.raises(StageStartError, match="nowhere"):
        Omni(temporary / "nowhere")
    with pytest.raises(ConfigError, match=r"stages\.thinker\.thread: no such key, did you mean"):
        Omni(stages={"thinker": {"thread": 1}})
    with pytest.raises(OutputError, match="cannot write the log"):
        Omni(log=temporary / "none" / "a.log")
    assert not [path for path in temporary.iterdir() if path.is_dir()]


def test_a_gateway_that_is_lost_ends_answers_and_its_error_names_the_log(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_THINKER", "mute")
    with Omni() as omni:
        answer = omni.chat("Hello")
        (gateway,) = (each for each in stacks() if each.cmdline()[1:3] == ["-m", "gateway"])
        gateway.kill()
        with pytest.raises(GatewayUnreachableError) as raised:
            answer.result()
    assert raised.value.__notes__ == [f"the log of the stack is {omni.log}"]
    assert "thinker says hello" in omni.log.read_text()


@pytest.mark.parametrize(
    ("then", "number", "status"),
    [
        ("", None, 0),
        ("del omni; time.sleep(0); print('deleted', flush=True); time.sleep(60)", signal.SIGTERM, -15),
        ("omni.generate(['a'] * 9)", signal.SIGINT, 130),
        ("time.sleep(60)", signal.SIGKILL, -9),
    ],
    ids=["the end", "no reference", "Ctrl-C", "kill"],
)
def test_nothing_outlives_the_program(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, then: str, number: int | None, status: int
) -> None:
    monkeypatch.setenv("FAKE_THINKER", "mute")
    command = [sys.executable, "-c", LEFT.format(then=then)]
    with Child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(processes) == 5
        if "deleted" in then:
            assert process.stdout.readline() == "deleted\n"
            assert not any(each.is_running() for each in processes)
        if number is not None:
            os.kill(process.pid, number)
        _, told = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in told) in [(status, False), (-2, True)]
    _, left = psutil.wait_procs(processes, 30)
    assert left == []
    if number is not signal.SIGKILL:
        assert list(temporary.iterdir()) == []
