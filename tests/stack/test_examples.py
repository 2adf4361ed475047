"""The programs in examples/, run as a user does, against the real stack."""

import io
import json
import shlex
import subprocess
import sys
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shared.messages import STAGES
from tests.support.http import Readings, get
from tests.support.media import clip, picture, spoken
from tests.support.processes import wait_until
from tests.support.proxy import Relay
from tests.support.stack import RunningStack, inherited

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECORDER = """\
import itertools, os, sys, time
spoken = open("spoken.raw", "rb").read()
for begin in itertools.count(step=4800):
    sys.stdout.buffer.write(spoken[begin : begin + 4800].ljust(4800, b"\\0"))
    sys.stdout.buffer.flush()
    time.sleep(0.1)
    if os.path.exists("played.raw") and os.path.getsize("played.raw") > 24_000:
        break
"""
SHORT = ("--max-tokens", "12", "--max-seconds", "1")


def run(folder: Path, name: str, *arguments: str, **environment: str) -> str:
    """What an example prints; of a notebook, its cells."""
    program = [str(EXAMPLES / name)]
    if name.endswith(".ipynb"):
        cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
        program = ["-c", "\n".join("".join(each["source"]) for each in cells if each["cell_type"] == "code")]
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env=inherited() | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def seconds_of(path: Path, at_most_s: float = 1) -> float:
    """The length of a WAV file of speech, which is not silence."""
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        assert np.abs(samples).max() > 300
        assert samples.size <= at_most_s * 24_000
        return samples.size / 24_000


def test_every_example_is_listed_and_tested() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tested = Path(__file__).read_text(encoding="utf-8")
    own = [EXAMPLES / "voice" / name for name in ("talk.py", "see_and_talk.py")]
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb"), *own):
        name = str(path.relative_to(EXAMPLES))
        assert f"`{name}`" in page
        assert f'"{name}"' in tested


def test_chat(stack: RunningStack, tmp_path: Path) -> None:
    shown = run(tmp_path, "chat.py", "Hello!", "--address", stack.address, *SHORT)
    seconds = seconds_of(tmp_path / "answer.wav")
    assert shown.endswith(f"{seconds:.1f} s of speech in answer.wav\n")


def test_streaming_to_a_player_and_into_a_file(stack: RunningStack, tmp_path: Path) -> None:
    player = [sys.executable, "-c", "import sys; open('played.raw', 'wb').write(sys.stdin.buffer.read())"]
    run(
        tmp_path,
        "stream.py",
        *("--address", stack.address, "--out", "collected.raw"),
        *("--play", shlex.join(player)),
        *SHORT,
    )
    collected = (tmp_path / "collected.raw").read_bytes()
    assert 0 < len(collected) <= 4 * 24_000
    assert (tmp_path / "played.raw").read_bytes() == collected
    failing = [sys.executable, str(EXAMPLES / "stream.py"), "--address", stack.address, "--play", "cat"]
    assert subprocess.run([*failing, "--max-tokens", "0"], timeout=60, check=False).returncode == 1


def test_a_question_about_an_image(stack: RunningStack, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(picture())
    shown = run(tmp_path, "describe_image.py", "cat.png", "--address", stack.address, "--max-tokens", "12")
    assert shown.strip()


def test_a_question_by_voice(stack: RunningStack, tmp_path: Path) -> None:
    (tmp_path / "question.wav").write_bytes(spoken())
    shown = run(tmp_path, "ask_by_voice.py", "question.wav", "--address", stack.address, *SHORT)
    assert shown.strip()
    assert seconds_of(tmp_path / "answer.wav")


def test_the_openai_sdk(stack: RunningStack, tmp_path: Path) -> None:
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")
    shown = run(tmp_path, "openai_sdk.py", "Hello!", "--url", f"{url}/v1", *SHORT)
    assert shown.strip()
    assert seconds_of(tmp_path / "answer.wav")


def test_structured_output(stack: RunningStack, tmp_path: Path) -> None:
    shown = run(tmp_path, "structured_output.py", "Hello!", "--address", stack.address)
    assert "'operation': " in shown


def test_a_tool_is_called_and_its_result_told(stack: RunningStack, tmp_path: Path) -> None:
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")
    arguments = ("--url", f"{url}/v1", "--choice", "required", "--max-tokens", "60")
    called, answer = run(tmp_path, "tools.py", *arguments).split("\n", 1)
    assert called in (
        'weather({"place":"Berlin"}): rain, 8 degrees',
        'weather({"place":"Nairobi"}): sun, 24 degrees',
    )
    assert answer.strip()


def test_errors_and_ways_to_end_an_answer(stack: RunningStack, tmp_path: Path) -> None:
    shown = run(tmp_path, "errors.py", "--address", stack.address, "--seconds", "0.01")
    refused, limit, words = shown.split("\n", 2)
    assert refused.startswith("refused: ")
    assert "temperature" in refused
    assert limit == "not within 0.01 s"
    assert words.startswith("the first words, which are enough: ")
    assert run(tmp_path, "errors.py", "--address", "tcp://127.0.0.1:1").startswith("no server: ")


def test_batch(stack: RunningStack, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Hello!\n\nAnd you?\n")
    shown = run(tmp_path, "batch.py", "prompts.txt", "--address", stack.address, "--max-tokens", "6")
    answers = {line["line"]: line["text"] for line in map(json.loads, shown.splitlines())}
    assert answers.keys() == {1, 3}
    assert all(answers.values())


def test_a_conversation_through_microphone_and_loudspeaker_that_outlives_its_network(
    stack: RunningStack, tmp_path: Path
) -> None:
    with wave.open(io.BytesIO(spoken(rate=24_000))) as file:
        (tmp_path / "spoken.raw").write_bytes(file.readframes(-1))
    (tmp_path / "record.py").write_text(RECORDER)
    gateway = stack.config["gateway"]["http"]

    def told(name: str, **labels: str) -> float:
        return Readings(get(gateway, "/metrics").metrics.values())(name, **labels)

    def resumed() -> float:
        return sum(
            told("omnirelay_realtime_resumes_total", outcome=each) for each in ("resumed", "taken_over")
        )

    def lose(relay: Relay, turns: float) -> None:
        wait_until(lambda: told("omnirelay_realtime_turns_total", event="started") > turns, "a question")
        relay.cut()
        relay.heal()

    before, turns = resumed(), told("omnirelay_realtime_turns_total", event="started")
    with Relay(gateway) as relay, ThreadPoolExecutor(1) as other:
        lost = other.submit(lose, relay, turns)
        url = relay.address.replace("tcp:", "http:")
        commands = ("--record", f"{sys.executable} record.py", "--play", "dd of=played.raw status=none")
        shown = run(tmp_path, "voice/talk.py", *commands, OPENAI_BASE_URL=f"{url}/v1")
        lost.result()
    assert "error" not in shown
    assert shown.startswith("connecting again\n")
    assert (tmp_path / "played.raw").stat().st_size > 24_000
    assert resumed() == before + 1


def test_a_question_about_what_a_camera_sees(stack: RunningStack, tmp_path: Path) -> None:
    (tmp_path / "question.mp4").write_bytes(clip("mp4", 4.0, 10, 160, 112, text="What do you see here?"))
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")
    before = seen(stack)
    play = ("--play", "dd of=played.raw status=none")
    shown = run(tmp_path, "voice/see_and_talk.py", "question.mp4", *play, OPENAI_BASE_URL=f"{url}/v1")
    assert "error" not in shown
    assert (tmp_path / "played.raw").stat().st_size > 0
    assert seen(stack) > before


def seen(stack: RunningStack) -> float:
    """How many videos the thinker has decoded."""
    told = Readings(get(stack.config["stages"]["thinker"]["http"], "/metrics").metrics.values())
    return told("omnirelay_media_items_total", stage="thinker", kind="video", outcome="decoded")


@pytest.mark.long
def test_the_notebook_of_offline_inference(speaking_checkpoint: Path, tmp_path: Path) -> None:
    threads = {f"OMNIRELAY_STAGES__{stage.upper()}__THREADS": "1" for stage in STAGES}
    shown = run(tmp_path, "offline.ipynb", OMNI_MODEL=str(speaking_checkpoint), **threads)
    first, second, third, *_ = shown.splitlines()
    assert "text='twenty plus sixteen is thirty six'" in first
    assert "text='sixteen minus five is eleven', audio_seconds=0.00" in second
    assert "there is no speaker 'Nobody'" in third
    assert "thirty" in shown.partition(third)[2]
    assert seconds_of(tmp_path / "answer.wav", at_most_s=10)
