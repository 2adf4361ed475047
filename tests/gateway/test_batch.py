"""``omnirelay batch``: every line is answered or has a reason, and a second run does only what is missing."""

import asyncio
import fcntl
import json
import signal
import subprocess
import sys
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from omnirelay.cli.main import main
from shared.messages import STAGES
from tests.gateway.bench import Bench, Configure, bench, run
from tests.gateway.fake_stages import until
from tests.support.children import Child


@asynccontextmanager
async def serving(configure: Configure, **limits: Any) -> AsyncIterator[Bench]:
    async with bench(configure(**limits)) as b:
        b.stages.serve(b.encode("Hello there"))
        yield b


async def batch(b: Bench, prompts: Path, out: Path, *more: str) -> int:
    arguments = ["batch", str(prompts), "--out", str(out), "--gateway", b.listen, *more]
    return await asyncio.to_thread(main, arguments)


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_line_has_an_answer_or_a_reason(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"cat")
    out = tmp_path / "out"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    prompts = written(
        folder / "prompts.jsonl",
        {"id": "hello", "text": "Hi", "seed": 7, "temperature": 0, "max_tokens": 9, "max_codec_tokens": 8},
        {"text": "What is this?", "images": ["cat.jpg"], "speech": False},
        "",
        {"id": "talk", "messages": [*turns, {"role": "user", "content": "And?"}]},
        {"id": "hello", "text": "Again"},
        "no JSON",
        {"id": "../up", "text": "Hi"},
        {"id": "both", "text": "Hi", "messages": turns},
        {"id": "typo", "txt": "Hi"},
        {"id": "missing", "audio": ["nothing.wav"]},
        {"id": "voice", "text": "Hi", "speaker": "Nobody"},
    )

    async with serving(configure) as b:
        assert await batch(b, prompts, out) == 1
        requests = {request.seed: request for request in b.stages.requests}
        assert len(b.stages.requests) == 3
        assert (requests[7].sampling.temperature, requests[7].sampling.max_tokens) == (0, 9)
        speech = requests[7].speech
        assert speech is not None
        assert (speech.sampling.temperature, speech.sampling.max_tokens) == (0, 8)
        assert [item.kind for each in b.stages.requests for item in each.media] == ["image"]
    results = {line["id"]: line for line in lines(out / "results.jsonl")}
    assert set(results) == {"hello", "line-2", "talk"}
    assert all(line["text"] == "Hello there" for line in results.values())
    assert results["hello"]["seed"] == 7
    assert results["line-2"]["speech"] is None
    for name in ("hello", "talk"):
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
    }
    assert "another line has the id 'hello'" in failures[5]["message"]
    assert "txt" in failures[9]["message"]
    assert str(folder / "nothing.wav") in failures[10]["message"]
    shown = capsys.readouterr().err
    assert "3 of 10 answered, 7 failed" in shown
    assert str(out / "failures.jsonl") in shown


async def test_a_file_with_a_byte_order_mark_is_read(configure: Configure, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    text = "".join(f'{{"id": "{name}", "text": "Hi", "speech": false}}\r\n' for name in "ab")
    prompts.write_bytes(text.encode("utf-8-sig"))

    async with serving(configure) as b:
        assert await batch(b, prompts, tmp_path / "out") == 0
    assert {line["id"] for line in lines(tmp_path / "out" / "results.jsonl")} == {"a", "b"}


async def test_a_second_run_asks_only_for_what_is_missing(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    prompts = tmp_path / "prompts.jsonl"
    first = [{"id": f"p{number}", "text": f"Hi {number}", "speech": False} for number in range(4)]
    written(prompts, *first[:2], {"id": "p2", "text": "Hi 2", "speaker": "Nobody"})

    async with serving(configure) as b:
        assert await batch(b, prompts, out) == 1
        # As a run leaves it that was killed while it wrote.
        with (out / "results.jsonl").open("ab") as file:
            file.write(b'{"id":"p3","line_sha')
        changed = {"id": "p1", "text": "Something else", "speech": False}
        written(prompts, first[0], changed, *first[2:])
        assert await batch(b, prompts, out) == 0
        assert len(b.stages.requests) == 2 + 3
        assert await batch(b, prompts, out) == 0
        assert len(b.stages.requests) == 2 + 3
    assert [line["id"] for line in lines(out / "results.jsonl")[:2]] == ["p0", "p1"]
    assert sorted(line["id"] for line in lines(out / "results.jsonl")[2:]) == ["p1", "p2", "p3"]
    assert lines(out / "failures.jsonl") == []
    assert "4 of 4 answered, 4 of them by an earlier run" in capsys.readouterr().err


async def test_it_waits_where_the_gateway_is_busy(configure: Configure, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.jsonl", *({"text": f"Hi {number}"} for number in range(12)))

    async with serving(configure, max_active=1, max_queued=1) as b:
        assert await batch(b, prompts, tmp_path / "out", "--text-only", "--concurrency", "6") == 0
        assert all(request.speech is None for request in b.stages.requests)
        assert b.counts["refused"] > 0, "the gateway was never busy, so nothing was tried again"
    assert len(lines(tmp_path / "out" / "results.jsonl")) == 12


async def test_a_folder_is_one_runs_and_holds_results_alone(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    prompts = written(tmp_path / "prompts.jsonl", {"text": "Hi"})

    async with serving(configure) as b:
        assert await batch(b, prompts, out, "--text-only") == 0
        with (out / "results.jsonl").open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            assert await batch(b, prompts, out) == 1
        assert f"another run writes into {out}" in capsys.readouterr().err
        (out / "results.jsonl").write_text("mine\n")
        assert await batch(b, prompts, out) == 1
        assert "line 1 is no result of a batch" in capsys.readouterr().err
        assert (out / "results.jsonl").read_text() == "mine\n"
        (tmp_path / "file").touch()
        assert await batch(b, prompts, tmp_path / "file") == 1
        assert "cannot write into" in capsys.readouterr().err
        assert await batch(b, tmp_path / "nothing.jsonl", out) == 1
        assert "cannot read" in capsys.readouterr().err


async def test_a_gateway_that_is_gone_ends_the_run_and_leaves_what_was_answered(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("omnirelay.cli.target.RECONNECT_S", 0.5)
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


def test_it_starts_a_stack_of_its_own_and_resumes_after_an_interruption(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = written(place / "prompts.jsonl", *({"text": f"Hi {number}"} for number in range(20)))
    command = [sys.executable, "-m", "omnirelay.cli", "batch", str(prompts), "--out", "out"]
    monkeypatch.setenv("FAKE_THINKER", "mute")
    with Child(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        run(until((place / "out" / "results.jsonl").exists, "the first request"))
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    assert process.returncode == 130
    assert shown.endswith("0 of 20 answered\ninterrupted: the same command resumes\n")
    monkeypatch.delenv("FAKE_THINKER")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "20 of 20 answered\n")
    assert len(lines(place / "out" / "results.jsonl")) == 20


async def test_it_waits_for_a_stage_that_starts(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.batch.runner.RETRY_S", 0.01)
    prompts = written(tmp_path / "prompts.jsonl", {"text": "Hi"})

    async with bench(configure(), ready=False, alive=()) as b:
        b.stages.serve(b.encode("Hello"))
        running = asyncio.create_task(batch(b, prompts, tmp_path / "out", "--text-only"))
        await until(lambda: b.counts["refused"] > 0, "a request that found no stage")
        b.stages.alive.update(STAGES)
        assert await running == 0
