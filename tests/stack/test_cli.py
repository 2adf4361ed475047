"""The command line, and vLLM's benchmark, against the real stack, as a user types them."""

import argparse
import json
import wave
from pathlib import Path

import pytest

from tests.support.stack import RunningStack, omnirelay

SHORT = ("--max-tokens", "12", "--max-codec-tokens", "40", "--seed", "5")


def test_peak_memory_of_the_four_processes_is_known(stack: RunningStack) -> None:
    report = json.loads(omnirelay("status", "--json", "--gateway", stack.address).stdout)
    peaks = {each["name"]: each["peak_memory_bytes"] for each in report["stages"]}
    assert len(peaks) == 3
    assert all(10 * 2**20 < peak < 4 * 2**30 for peak in peaks.values())
    assert 10 * 2**20 < report["gateway"]["peak_memory_bytes"] < 200 * 2**20


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


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai-chat", "/v1/chat/completions"), ("openai-responses", "/v1/responses")]
)
def test_vllms_benchmark_drives_it(
    stack: RunningStack, tiny_checkpoint: Path, tmp_path: Path, backend: str, endpoint: str
) -> None:
    """As ``vllm bench serve`` does."""
    from vllm.benchmarks import serve  # noqa: PLC0415 - loads vLLM

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    result = tmp_path / "result.json"
    options = {
        "backend": backend,
        "base-url": stack.config["gateway"]["http"].replace("tcp:", "http:"),
        "endpoint": endpoint,
        "model": "omnirelay",
        "tokenizer": tiny_checkpoint,
        "dataset-name": "random",
        "random-input-len": 16,
        "random-output-len": 8,
        "num-prompts": 6,
        "max-concurrency": 3,
        "temperature": 0,
        "result-filename": result,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    serve.main(parser.parse_args([*words, "--ignore-eos", "--save-result", "--disable-tqdm"]))
    told = json.loads(result.read_text())
    assert (told["completed"], told["total_output_tokens"]) == (6, 6 * 8)
    assert told["median_ttft_ms"] > 0
