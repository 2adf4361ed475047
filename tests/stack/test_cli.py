"""The command line against the real stack, as a user types it."""

import json
import wave
from pathlib import Path

import numpy as np
import pytest

from tests.support.stack import RunningStack, chat_events, omnirelay

SHORT = ("--max-tokens", "12", "--max-codec-tokens", "40", "--seed", "5")


def test_json_streams_text_and_audio_and_ends_with_everything(stack: RunningStack, tmp_path: Path) -> None:
    out = tmp_path / "reply.wav"
    *events, done = chat_events(stack, "Tell me a story.", *SHORT, "--out", str(out))
    texts = [event for event in events if event["event"] == "text"]
    audio = [event for event in events if event["event"] == "audio"]
    assert len(texts) + len(audio) == len(events)
    assert done["event"] == "done"
    assert "".join(event["text"] for event in texts) == done["text"] != ""
    assert [token for event in texts for token in event["token_ids"]] == done["text_token_ids"]
    assert len(done["text_token_ids"]) <= 12
    assert 0 < len(done["codec_token_ids"]) <= 40
    assert [event["seq"] for event in audio] == list(range(len(audio)))
    samples = sum(event["samples"] for event in audio)
    assert samples == round(done["audio_seconds"] * 24_000) == len(done["codec_token_ids"]) * 480
    assert 0 < done["ttft_s"] <= done["wall_s"]
    assert 0 < done["ttfa_s"] <= done["wall_s"]
    assert done["finish_reason"] in ("stop", "length")
    assert done["prompt_token_ids"]
    assert done["request_id"]
    with wave.open(str(out)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        pcm = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32_767
    assert pcm.size == samples
    assert 0.01 < np.sqrt(np.mean(np.square(pcm))) < 0.5


def test_peak_memory_of_the_four_processes_is_known(
    stack: RunningStack, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads(omnirelay("status", "--json", "--gateway", stack.address).stdout)
    peaks = {stage["name"]: stage["peak_memory_bytes"] for stage in report["stages"]}
    peaks["gateway"] = report["gateway"]["peak_memory_bytes"]
    with capsys.disabled():
        print("\npeak memory:", ", ".join(f"{name} {peak / 2**20:.0f} MiB" for name, peak in peaks.items()))
    assert all(10 * 2**20 < peak < 4 * 2**30 for peak in peaks.values())
    assert peaks["gateway"] < 200 * 2**20


def test_a_conversation_computes_what_was_said_before_only_once(stack: RunningStack, tmp_path: Path) -> None:
    """Through the prefix cache, which works by blocks of 32 positions."""
    told = "Remember the house and the tree. " * 20
    lines = [told, "And now?", "/voice Ethan", "Again.", f"/save {tmp_path}/last.wav", ""]
    done = omnirelay("chat", "--json", *SHORT, "--gateway", stack.address, lines="\n".join(lines))
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    first, second, third = (event for event in events if event["event"] == "done")
    assert first["speaker"] == second["speaker"] != third["speaker"] == "Ethan"
    assert first["prompt_tokens"] < second["prompt_tokens"] < third["prompt_tokens"]
    for earlier, later in ((first, second), (second, third)):
        assert later["cached_prompt_tokens"] >= earlier["prompt_tokens"] // 32 * 32 > 0
    with wave.open(str(tmp_path / "last.wav")) as file:
        assert file.getnframes() == len(third["codec_token_ids"]) * 480


def test_the_doctor_finds_the_running_stack_well(stack: RunningStack) -> None:
    done = omnirelay("doctor", "--json", "--config", str(stack.path))
    report = json.loads(done.stdout)
    assert (done.returncode, report["problems"]) == (0, 0), report
    levels = {finding["check"]: finding["level"] for finding in report["findings"]}
    for check in ("vllm", "device", "configuration", "addresses", "ports", "checkpoint", "memory"):
        assert levels[check] == "ok", report
    (ports,) = (finding for finding in report["findings"] if finding["check"] == "ports")
    assert "thinker ready, talker ready, token2wav ready" in ports["what"]
