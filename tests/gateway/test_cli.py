"""The command line: what it prints, what it writes, how it fails."""

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import wave
from pathlib import Path

import av
import pytest
from PIL import Image

from gateway.http.encoding.encoders import wav_header
from omnirelay import Client, GenerateRequest
from omnirelay.cli.chat.camera import Camera
from omnirelay.cli.main import main
from omnirelay.content import media_of
from ops import demo
from tests.gateway.bench import Bench, Configure, Output, Patch, bench
from tests.gateway.http_bench import HttpBench
from tests.support.camera import video_file
from tests.support.children import ROOT
from tests.support.ports import free_ports
from tests.support.terminal import piped

GREETING = "Hello 😀 there"
DONE_FIELDS = "request_id text prompt_token_ids text_token_ids codec_token_ids audio_seconds ttft_s ttfa_s"
DONE_FIELDS += " wall_s finish_reason prompt_tokens cached_prompt_tokens"


async def run(b: Bench, *arguments: str) -> int:
    """The exit status of a command, which asks this gateway."""
    return await asyncio.to_thread(main, [*arguments, "--gateway", b.listen])


async def test_a_full_disk_behind_the_standard_output_is_told_in_one_line(served: Bench) -> None:
    there = ["--gateway", served.listen]
    for arguments in (
        ["chat", "Hi", "--text-only", "--no-play", *there],
        ["chat", "Hi", "--json", "--no-play", *there],
        ["status", *there],
    ):
        with Path("/dev/full").open("wb") as full:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "omnirelay.cli", *arguments, stdout=full, stderr=subprocess.PIPE
            )
            _, told = await process.communicate()
        assert process.returncode == 1
        assert told.decode() == (
            "omnirelay: stdout_unwritable: cannot write to the standard output: No space left on device\n"
        )


async def test_chat_json_and_wav(served: Bench, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "reply.wav"
    arguments = ["chat", "Hi", "--json", "--greedy", "--seed", "5", "--max-tokens", "9"]
    arguments += ["--max-codec-tokens", "8", "--voice", "Ethan", "--system", "Be brief.", "--out", str(out)]
    assert await run(served, *arguments) == 0
    request = served.stages.requests[0]
    assert (request.sampling.temperature, request.sampling.max_tokens, request.seed) == (0, 9, 5)
    assert request.speech is not None
    assert (request.speech.sampling.temperature, request.speech.sampling.max_tokens) == (0, 8)
    assert request.speech.speaker == "Ethan"
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    done = lines[-1]
    assert done["event"] == "done"
    assert set(DONE_FIELDS.split()) <= set(done)
    texts = [line for line in lines if line["event"] == "text"]
    assert "".join(line["text"] for line in texts) == done["text"] == "Hello 😀 there"
    assert [each for line in texts for each in line["token_ids"]] == done["text_token_ids"]
    audio = [line for line in lines if line["event"] == "audio"]
    assert audio == [
        {"event": "audio", "seq": 0, "samples": 240},
        {"event": "audio", "seq": 1, "samples": 120},
    ]
    with wave.open(str(out)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        frames = file.readframes(file.getnframes())
    assert frames == bytes(480) + (16384).to_bytes(2, "little") * 120


async def test_chat_for_people(served: Bench, capsys: Output) -> None:
    assert await run(served, "chat", "Hi", "--text-only") == 0
    assert served.stages.requests[0].speech is None
    answer, shown = capsys.readouterr()
    assert answer == "Hello 😀 there\n"
    for label in ("time to first text", "time to first audio: none", "audio length", "wall time"):
        assert label in shown
    assert re.search(r"^prompt tokens: +\d+, 3 of them cached$", shown, re.MULTILINE)


async def test_no_encoding_and_no_closed_stream_ends_an_answer(served: Bench) -> None:
    command = ["-m", "omnirelay.cli", "chat", "Hi", "--text-only", "--gateway", served.listen]
    for more, last in (([], "Hello ? there\n"), (["--json"], '"wall_s": ')):
        status, out, _ = await piped(*command, *more, lines=b"", env={"PYTHONIOENCODING": "latin-1"})
        assert (status, last in out) == (0, True)
    for closed in ("1", "2"):
        script = f"exec {sys.executable} {' '.join(command)} {closed}>&-"
        done = await asyncio.to_thread(subprocess.run, ["sh", "-c", script], capture_output=True, check=False)
        assert done.returncode == 0


async def test_chat_with_files(served: Bench, tmp_path: Path, capsys: Output) -> None:
    for name in ("a.ogg", "b.ogg", "c.png", "d.mp4"):
        (tmp_path / name).write_bytes(name.encode())
    files = ["--audio", "a.ogg", "--image", "c.png", "--video", "d.mp4", "--audio", "b.ogg"]
    paths = [each if each[:2] == "--" else str(tmp_path / each) for each in files]
    common = ["--text-only", "--json"]
    assert await run(served, "chat", "Hi", *paths, "--use-audio-in-video", *common) == 0
    assert await run(served, "chat", *paths[:2], *common) == 0
    assert await run(served, "chat", "--image", str(tmp_path / "none.png"), *common) == 1
    with_text, alone = served.stages.requests
    assert [(each.kind, bytes(each.data.view)) for each in with_text.media] == [
        ("audio", b"a.ogg"),
        ("audio", b"b.ogg"),
        ("image", b"c.png"),
        ("video", b"d.mp4"),
    ]
    assert with_text.use_audio_in_video
    assert [each.kind for each in alone.media] == ["audio"]
    assert not alone.use_audio_in_video
    *_, done, error = map(json.loads, capsys.readouterr().out.splitlines())
    assert done["prompt_tokens"] > len(done["prompt_token_ids"])
    assert error["code"] == "media_invalid"
    assert error["message"] == f"image 1: cannot read {tmp_path / 'none.png'}: No such file or directory"


def _jpeg(color: str, width: int = 64) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 48), color).save(file, "JPEG")
    return file.getvalue()


def _shown(file: bytes | memoryview | None) -> list[int]:
    with Image.open(io.BytesIO(file or b"")) as picture:
        assert picture.format == "JPEG"
        assert max(picture.size) <= 896
        return [channel // 128 for channel in picture.convert("RGB").resize((1, 1)).tobytes()]


async def test_the_camera_goes_with_a_message(served: Bench, tmp_path: Path) -> None:
    source = tmp_path / "camera.mov"
    source.write_bytes(video_file([_jpeg("red", 2000)], bytes(2400)))
    assert await run(served, "chat", "Hi", "--camera", str(source), "--text-only") == 0
    [part] = served.stages.requests[0].media
    assert _shown(part.data.view) == [1, 0, 0]


def test_the_camera_shows_what_is_there_now(tmp_path: Path) -> None:
    source = tmp_path / "camera.mov"
    source.write_bytes(video_file([_jpeg("red"), _jpeg("lime"), _jpeg("blue")], bytes(72_000)))
    with Camera(str(source)) as camera:
        give_up = time.monotonic() + 30
        while _shown(camera.picture().data) != [0, 0, 1]:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        assert _shown(camera.picture().data) == [0, 0, 1]


@pytest.mark.parametrize(
    ("written", "told"),
    [(None, "No such file"), (b"nothing", "Invalid data"), (bytes(wav_header(0)), "no pictures")],
)
def test_what_is_no_camera_is_told(tmp_path: Path, written: bytes | None, told: str, capsys: Output) -> None:
    source = tmp_path / "camera"
    if written is not None:
        source.write_bytes(written)
    assert main(["chat", "Hi", "--camera", str(source), "--json"]) == 1
    error = json.loads(capsys.readouterr().out)
    assert error["code"] == "media_invalid"
    assert error["message"].startswith(f"--camera {source}: ")
    assert told in error["message"]


def test_a_camera_of_another_operating_system_is_told(capsys: Output) -> None:
    assert main(["chat", "Hi", "--camera", "dshow:video=front"]) == 1
    assert "media_invalid: --camera dshow:video=front: no container format" in capsys.readouterr().err


async def test_chat_errors(served: Bench, tmp_path: Path, capsys: Output, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = ["chat", "Hi", "--voice", "Nobody"]
    assert await run(served, *wrong) == 1
    assert await run(served, *wrong, "--json") == 1
    (tmp_path / "out").write_text("")
    assert main(["demo"]) == 1
    for name in ("out/x.wav", "missing/x.wav", "reply.mp3", "reply"):
        assert await run(served, "chat", "Hi", "--out", str(tmp_path / name)) == 1
    assert served.stages.requests == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out"]
    captured = capsys.readouterr()
    told = captured.err.splitlines()
    assert len(told) == 6
    assert "there is no folder out" in told.pop(1)
    assert told[0].startswith("omnirelay: unknown_speaker: there is no speaker 'Nobody'")
    assert f"cannot write {tmp_path}/out/x.wav: there is no folder" in told[1]
    assert f"there is no folder {tmp_path}/missing, make it first" in told[2]
    assert all("a name that ends in .wav" in line for line in told[3:])
    error = json.loads(captured.out.splitlines()[0])
    assert (error["event"], error["code"]) == ("error", "unknown_speaker")
    assert "Chelsie" in error["message"]


@pytest.mark.parametrize(
    "wrong", [["\udcff"], ["Hi", "--seed", str(2**70)], ["Hi", "--max-tokens", str(-(2**70))]]
)
async def test_what_cannot_be_sent_is_an_error_like_others(
    served: Bench, capsys: Output, wrong: list[str]
) -> None:
    assert await run(served, "chat", *wrong, "--json") == 1
    assert await run(served, "chat", *wrong) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["code"] == "invalid_request"
    assert captured.err.startswith("omnirelay: invalid_request: the request cannot be sent")


def test_the_version(capsys: Output) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert capsys.readouterr().out == f"omnirelay {project['version']}\n"


def test_no_gateway(capsys: Output) -> None:
    nobody = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    assert main(["status", "--gateway", nobody]) == 1
    told = capsys.readouterr().err
    assert told.startswith("omnirelay: gateway_unreachable: no gateway answers at")
    assert "omnirelay up" in told
    for asked in (["chat", "Hi"], ["status"]):
        for address, code in ((nobody, "gateway_unreachable"), ("tcp://a..b:5555", "config_invalid")):
            assert main([*asked, "--json", "--gateway", address]) == 1
            assert json.loads(capsys.readouterr().out)["code"] == code
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "omnirelay.cli", "status", "--json", "--gateway", nobody]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["chat", "Hi", "--max-token", "3", "--text-onyl"], "--text-onyl; did you mean --text-only?"),
        (["cluster", "status", "--adress=x"], "--adress=x; did you mean --address?"),
        (["chat", "Hi", "--qqq"], "unrecognized arguments: --qqq"),
        (["chat", "Hi", "--out", "a.wav", "--text-only"], "--text-only gives no speech for --out"),
        (["chat"], "error: give TEXT, --audio, --image or --video, or lines on standard input\n"),
        (["completion", "tcsh"], "invalid choice"),
    ],
)
def test_wrong_usage_is_told_and_the_nearest_option(arguments: list[str], told: str, capsys: Output) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert told in capsys.readouterr().err


async def test_chat_at_the_port_of_http_says_so(web: HttpBench, capsys: Output) -> None:
    address = web.url.rstrip("/").replace("http:", "tcp:")
    assert await asyncio.to_thread(main, ["chat", "Hi", "--gateway", address]) == 1
    assert "its port is gateway.listen, 5555 by default, and not that of HTTP" in capsys.readouterr().err


def test_the_files_of_the_demo_are_what_is_said_of_them() -> None:
    question, picture = (demo._read(name) for name in (demo.QUESTION, demo.PICTURE))
    assert max(len(question), len(picture)) < 40_000
    with av.open(io.BytesIO(question), "r") as file:
        assert (file.format.name, file.streams.audio[0].codec.name) == ("ogg", "opus")
        seconds = sum(frame.samples for frame in file.decode(audio=0)) / 48_000
    assert f"Ogg Opus, {seconds:.1f} s," in demo.DESCRIBED[demo.QUESTION]
    with Image.open(io.BytesIO(picture)) as drawing:
        said = f"{drawing.format}, {drawing.width} x {drawing.height} pixels,"
    assert said in demo.DESCRIBED[demo.PICTURE]


def test_the_demo_asks_what_the_checkpoint_brings(tmp_path: Path) -> None:
    [ours] = demo.questions(tmp_path)
    assert demo.questions(None) == [ours]
    media = [bytes(part.data or b"") for _, part in media_of(ours.request.messages)]
    assert media == [demo._read(demo.QUESTION), demo._read(demo.PICTURE)]
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    (tmp_path / "b.png").write_bytes(b"PNG")
    brought = [
        {"text": "One?"},
        {"text": "Two?"},
        {"audio": "a.wav", "says": "three"},
        {"text": "Four?", "image": "b.png"},
    ]
    (tmp_path / "starters.json").write_text(json.dumps(brought))
    typed, spoken, seen = demo.questions(tmp_path)
    assert (typed.prompt, typed.audio, typed.image) == ("One?", None, None)
    assert (spoken.prompt, spoken.audio, spoken.lines[0]) == ("", b"RIFF", 'audio:  a.wav, "three"')
    [(_, part)] = media_of(spoken.request.messages)
    assert bytes(part.data or b"") == b"RIFF"
    assert (seen.prompt, seen.image) == ("Four?", b"PNG")
    places = [demo._place(Path("out/reply.wav"), number, 3).name for number in (1, 2, 3)]
    assert places == ["reply-1.wav", "reply-2.wav", "reply-3.wav"]
    assert demo._place(Path("out/reply.wav"), 1, 1) == Path("out/reply.wav")


async def test_status(served: Bench, capsys: Output) -> None:
    async with served.client() as client:
        await client.chat("Hi").result()
    assert await run(served, "status") == 0
    assert await run(served, "status", "--json") == 0
    *table, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert [stage["name"] for stage in report["stages"]] == ["thinker", "talker", "token2wav"]
    assert report["requests"]["completed"] == 1
    assert report["gateway"]["peak_memory_bytes"] > 2**20
    shown = "\n".join(table)
    for word in ("gateway", "token2wav", "ready", "1 MiB", "completed"):
        assert word in shown


async def test_status_while_stages_start(configure: Configure, capsys: Output) -> None:
    async with bench(configure(), ready=False, alive=()) as b:
        assert await run(b, "status") == 0
    assert capsys.readouterr().out.count("starting") == 3


async def test_sync_client_serves_many_threads(tcp: Bench) -> None:
    client = await asyncio.to_thread(Client, tcp.listen)
    answers = [client.chat(f"Hi {number}", speech=False) for number in range(4)]
    waiting = [asyncio.create_task(asyncio.to_thread(answer.result)) for answer in answers]
    for index in range(4):
        await tcp.stages.answer(await tcp.stages.request(index), tcp.encode("Hello"))
    assert [each.text for each in await asyncio.gather(*waiting)] == ["Hello"] * 4
    with pytest.raises(TypeError):
        await asyncio.to_thread(lambda: client.chat(GenerateRequest(), seed=1))
    for _ in range(2):
        await asyncio.to_thread(client.close)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("msgspec", ["status"]),
        ("ops.commands", ["status"]),
        ("yaml", ["up"]),
        ("omnirelay.client.wav", ["chat", "Hi"]),
        ("zmq", ["keys", "folder"]),
    ],
)
def test_ctrl_c_while_modules_are_loaded(module: str, arguments: list[str], tmp_path: Path) -> None:
    interrupted = f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from omnirelay.cli.__main__ import main
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", interrupted, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
