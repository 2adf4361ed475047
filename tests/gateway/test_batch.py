"""``omnirelay batch`` and ``omnirelay.server``: many prompts, to a running stack or one of their own."""

import asyncio
import fcntl
import json
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

from omnirelay import AsyncClient, ChatMessage
from omnirelay.cli.main import main
from omnirelay.cli.target import Target
from omnirelay.errors import ConfigError, GatewayUnreachableError, OutputError, RequestError, StageStartError
from omnirelay.server import AsyncOmni, Omni, OmniAnswer
from shared.messages import STAGES
from tests.gateway.bench import Bench, Configure, Output, Patch, bench, run
from tests.gateway.fake_stages import until
from tests.support.children import Child


async def batch(b: Bench, prompts: Path, out: Path, *more: str) -> int:
    arguments = ["batch", str(prompts), "--out", str(out), "--gateway", b.listen, *more]
    return await asyncio.to_thread(main, arguments)


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_lines_have_an_answer_or_a_reason(served: Bench, tmp_path: Path, capsys: Output) -> None:
    folder = tmp_path / "in\udce4"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"cat")
    out = tmp_path / "out"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    prompts = written(
        folder / "prompts.jsonl",
        {"id": "hello", "text": "Hi", "seed": 7, "temperature": 0, "max_tokens": 9, "max_codec_tokens": 8},
        {"text": "What is this?", "images": ["cat.jpg"], "speech": False},
        "",
        {"id": "line-12", "messages": [*turns, {"role": "user", "content": "And?"}]},
        {"id": "hello", "text": "Again"},
        "no JSON",
        {"id": "../up", "text": "Hi"},
        {"id": "both", "text": "Hi", "messages": turns},
        {"id": "typo", "txt": "Hi"},
        {"id": "missing", "audio": ["nothing.wav"]},
        {"id": "voice", "text": "Hi", "speaker": "Nobody"},
        {"text": "Its name is taken"},
    )
    assert await batch(served, prompts, out) == 1
    requests = {request.seed: request for request in served.stages.requests}
    assert len(served.stages.requests) == 3
    assert (requests[7].sampling.temperature, requests[7].sampling.max_tokens) == (0, 9)
    speech = requests[7].speech
    assert speech is not None
    assert (speech.sampling.temperature, speech.sampling.max_tokens) == (0, 8)
    assert [item.kind for each in served.stages.requests for item in each.media] == ["image"]
    results = {line["id"]: line for line in lines(out / "results.jsonl")}
    assert set(results) == {"hello", "line-2", "line-12"}
    assert all(line["text"] == "Hello there" for line in results.values())
    assert results["hello"]["seed"] == 7
    assert results["line-2"]["speech"] is None
    for name in ("hello", "line-12"):
        assert results[name]["speech"] == f"speech/{name}.wav"
        with wave.open(str(out / results[name]["speech"])) as file:
            assert (file.getframerate(), file.getnframes()) == (24_000, 360)
    failures = {line["line"]: line for line in lines(out / "failures.jsonl")}
    assert {number: (line["id"], line["code"]) for number, line in failures.items()} == {
        5: ("hello", "invalid_request"),
        6: ("line-6", "invalid_request"),
        7: ("line-7", "invalid_request"),
        8: ("both", "invalid_request"),
        9: ("typo", "invalid_request"),
        10: ("missing", "media_invalid"),
        11: ("voice", "unknown_speaker"),
        12: ("line-12", "invalid_request"),
    }
    assert "another line has the id 'hello'" in failures[5]["message"]
    assert "txt" in failures[9]["message"]
    assert str(tmp_path / "in?" / "nothing.wav") in failures[10]["message"]
    shown = capsys.readouterr().err
    assert "3 of 11 answered, 8 failed" in shown
    assert str(out / "failures.jsonl") in shown


async def test_a_line_that_is_too_long_fails_alone(served: Bench, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("ops.batch.prompts.MAX_LINE_BYTES", 100)
    given = [{"id": name, "text": text} for name, text in (("a", "Hi"), ("b", "x" * 250), ("c", "Hi"))]
    assert await batch(served, written(tmp_path / "prompts.jsonl", *given), tmp_path / "out") == 1
    assert {line["id"] for line in lines(tmp_path / "out" / "results.jsonl")} == {"a", "c"}
    (failure,) = lines(tmp_path / "out" / "failures.jsonl")
    assert (failure["line"], failure["message"]) == (2, "line 2: longer than 100 bytes")


async def test_a_file_with_a_byte_order_mark_is_read(served: Bench, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    text = "".join(f'{{"id": "{name}", "text": "Hi", "speech": false}}\r\n' for name in "ab")
    prompts.write_bytes(text.encode("utf-8-sig"))
    assert await batch(served, prompts, tmp_path / "out") == 0
    assert {line["id"] for line in lines(tmp_path / "out" / "results.jsonl")} == {"a", "b"}


async def test_a_second_run_asks_for_the_rest(served: Bench, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "out"
    prompts = tmp_path / "prompts.jsonl"
    first = [{"id": f"p{number}", "text": f"Hi {number}", "speech": False} for number in range(4)]
    written(prompts, *first[:2], {"id": "p2", "text": "Hi 2", "speaker": "Nobody"})
    assert await batch(served, prompts, out) == 1
    # As a run leaves it that was killed while it wrote.
    with (out / "results.jsonl").open("ab") as file:
        file.write(b'{"id":"p3","line_sha')
    changed = {"id": "p1", "text": "Something else", "speech": False}
    written(prompts, first[0], changed, *first[2:])
    assert await batch(served, prompts, out) == 0
    assert len(served.stages.requests) == 2 + 3
    assert await batch(served, prompts, out) == 0
    assert len(served.stages.requests) == 2 + 3
    assert [line["id"] for line in lines(out / "results.jsonl")[:2]] == ["p0", "p1"]
    assert sorted(line["id"] for line in lines(out / "results.jsonl")[2:]) == ["p1", "p2", "p3"]
    assert lines(out / "failures.jsonl") == []
    assert "4 of 4 answered, 4 of them by an earlier run" in capsys.readouterr().err


async def test_it_waits_where_the_gateway_is_busy(configure: Configure, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.jsonl", *({"text": f"Hi {number}"} for number in range(12)))

    async with bench(configure(max_active=1, max_queued=1)) as b:
        out = tmp_path / "out"
        running = asyncio.create_task(batch(b, prompts, out, "--text-only", "--concurrency", "6"))
        await until(lambda: b.counts["refused"], "a busy gateway, so that something is tried again")
        b.stages.serve(b.encode("Hello there"))
        assert await running == 0
        assert all(request.speech is None for request in b.stages.requests)
    assert len(lines(out / "results.jsonl")) == 12


async def test_a_folder_is_one_runs_alone(served: Bench, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "out"
    prompts = written(tmp_path / "prompts.jsonl", {"text": "Hi"})
    assert await batch(served, prompts, out, "--text-only") == 0
    with (out / "results.jsonl").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert await batch(served, prompts, out) == 1
    assert f"another run writes into {out}" in capsys.readouterr().err
    (out / "results.jsonl").write_text("mine\n")
    assert await batch(served, prompts, out) == 1
    assert "line 1 is no result of a batch" in capsys.readouterr().err
    assert (out / "results.jsonl").read_text() == "mine\n"
    (tmp_path / "file").touch()
    assert await batch(served, prompts, tmp_path / "file") == 1
    assert "cannot write into" in capsys.readouterr().err
    assert await batch(served, tmp_path / "nothing.jsonl", out) == 1
    assert "cannot read" in capsys.readouterr().err
    reading, writing = os.pipe()
    os.close(writing)
    assert await batch(served, Path(f"/dev/fd/{reading}"), out) == 1
    assert "is read twice, which a pipe cannot be" in capsys.readouterr().err
    os.close(reading)


async def test_a_gateway_that_is_gone_ends_the_run_and_leaves_what_was_answered(
    configure: Configure, tmp_path: Path, monkeypatch: Patch, capsys: Output
) -> None:
    monkeypatch.setattr(Target, "client", lambda target: AsyncClient(target.addresses, reconnect_s=0.5))
    out = tmp_path / "out"
    prompts = written(tmp_path / "prompts.jsonl", *({"id": name, "text": name} for name in "ab"))

    async with bench(configure()) as b:
        running = asyncio.create_task(batch(b, prompts, out, "--text-only", "--concurrency", "1"))
        await b.stages.answer(await b.stages.request(0), b.encode("Hello"))
        await b.stages.request(1)
        await until((out / "results.jsonl").read_text, "the first result")
    assert await running == 1
    assert [line["id"] for line in lines(out / "results.jsonl")] == ["a"]
    assert lines(out / "failures.jsonl") == []
    assert "omnirelay: " in capsys.readouterr().err


def test_it_starts_its_own_stack_and_resumes(place: Path, monkeypatch: Patch) -> None:
    prompts = written(place / "prompts.jsonl", *({"text": f"Hi {number}"} for number in range(20)))
    command = [sys.executable, "-m", "omnirelay.cli", "batch", str(prompts), "--out", "out"]
    monkeypatch.setenv("FAKE_THINKER", "mute")
    with Child(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        run(until((place / "out" / "results.jsonl").exists, "the first request"))
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    assert process.returncode == 130
    assert shown == "0 of 20 answered\ninterrupted: the same command resumes\n"
    monkeypatch.delenv("FAKE_THINKER")
    monkeypatch.setenv("OMNIRELAY_TEXT_ONLY", "true")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "20 of 20 answered\n")
    assert len(lines(place / "out" / "results.jsonl")) == 20


async def test_it_waits_for_starting_stages(configure: Configure, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("ops.batch.runner.RETRY_S", 0.01)
    prompts = written(tmp_path / "prompts.jsonl", {"text": "Hi"})

    async with bench(configure(), ready=False, alive=()) as b:
        b.stages.serve(b.encode("Hello"))
        running = asyncio.create_task(batch(b, prompts, tmp_path / "out", "--text-only"))
        await until(lambda: b.counts["refused"] > 0, "a request that found no stage")
        b.stages.alive.update(STAGES)
        assert await running == 0


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
def temporary(place: Path, monkeypatch: Patch) -> Path:
    """The folder of temporary files, which holds those of stacks that this test starts."""
    folder = place / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


async def test_prompts_are_answered_in_order_or_fail_alone(temporary: Path, capsys: Output) -> None:
    """By plain code, as in a notebook: a loop runs in its thread."""
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
        wrong: Any = "retrun"
        with pytest.raises(TypeError, match="'raise' or 'return', not 'retrun'"):
            omni.generate("Hello", errors=wrong)
        with pytest.raises(RequestError) as raised:
            omni.generate(prompts[3:])
        with pytest.raises(TypeError, match="txt") as unknown:
            omni.generate(["Hi", {"txt": "Hi"}])
        wrong = [None, {"text": "Hi", "stop": 5}]
        malformed = omni.generate(wrong, errors="return")
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
    assert unknown.value.__notes__ == ["prompt 1 failed, counted from 0"]
    assert [getattr(each, "code", None) for each in malformed] == ["invalid_request"] * 2
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
        answers = await asyncio.gather(one.generate(["a", "b"]), two.generate("c"))
        assert [len(each) for each in answers] == [2, 1]
        with pytest.raises(RequestError, match=r"text-only \(text_only is set\): it cannot speak"):
            [event async for event in one.speak("Hello")]
        assert [event async for event in two.chat("Hello")]
        assert (await one.chat("d").result()).waveform == b""
        assert (await one.status()).gateway.text_only
    assert stacks() == []
    assert "thinker says hello" in (temporary / "one.log").read_text()


def test_a_stack_that_does_not_start_names_its_log(temporary: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FAKE_TALKER", "fail")
    with pytest.raises(StageStartError, match="the talker has no reason to live") as raised:
        Omni()
    (log,) = temporary.glob("omnirelay-*.log")
    assert f"the log of the stack is {log}" in str(raised.value)
    assert "no reason to live" in log.read_text()
    assert stacks() == []
    with pytest.raises(StageStartError, match="nowhere"):
        Omni(temporary / "nowhere", log="/dev/full")
    with pytest.raises(ConfigError, match=r"stages\.thinker\.thread: no such key, did you mean"):
        Omni(stages={"thinker": {"thread": 1}})
    with pytest.raises(OutputError, match="cannot write the log"):
        Omni(log=temporary / "none" / "a.log")
    assert not [path for path in temporary.iterdir() if path.is_dir()]


def test_the_error_of_a_lost_gateway_names_the_log(temporary: Path, monkeypatch: Patch) -> None:
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
    temporary: Path, monkeypatch: Patch, then: str, number: int | None, status: int
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
