"""Qwen3-Omni in processes of its own, asked over TCP, while a stage is killed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.qwen3_omni import TINY, write_qwen3_omni
from omnirelay import AudioEvent, Client, DoneEvent, GenerateRequest, SamplingOverrides, TextEvent
from omnirelay.errors import UnknownSpeakerError
from shared.messages import STAGES
from tests.qwen3_omni.tiny import Reference, prompt_of
from tests.support.http import get
from tests.support.processes import Processes, wait_until
from tests.support.stack import make_config
from tests.support.workers import TWO

pytestmark = pytest.mark.long
TEXT, LONG, FRAMES = 6, 200, 40
TOLERANCE = 1e-4


WORKERS = {name: {"engine": TWO, "threads": 2} for name in ("thinker", "talker")}
EXPERTS = {"moe_intermediate_size": 64}
WIDE = replace(TINY, text={**TINY.text, **EXPERTS}, talker={**TINY.talker, **EXPERTS})
"""Two workers can divide it."""


@contextmanager
def served(directory: Path, place: Path, **keys: Any) -> Iterator[Processes]:
    config = make_config(directory, **keys)
    with Processes(config, place) as running:
        yield running.start_all()


@pytest.fixture(scope="module")
def processes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with served(checkpoint, tmp_path_factory.mktemp("run")) as running:
        yield running


@pytest.mark.parametrize("victim", [None, *STAGES])
def test_an_answer_is_the_references(processes: Processes, reference: Reference, victim: str | None) -> None:
    check_answer(processes, reference, victim)
    told = get(processes.config["gateway"]["http"], "/metrics").metrics["omnirelay_request_resumes_total"]
    resumed = [each.labels["stage"] for each in told.samples if each.value]
    assert victim is None or victim in resumed
    wait_until(processes.ready, "the stages are ready again")


def test_the_gateway_learns_of_the_family_from_its_stages(processes: Processes) -> None:
    with Client(processes.address) as client:
        limits = {stage.name: stage.limits for stage in client.status().stages}
        codec = limits["talker"].codec
        assert codec is not None
        assert (codec.frame_samples, codec.groups) == (1920, TINY.groups)
        assert limits["token2wav"].speakers == ["aiden", "chelsie", "ethan"]
        with pytest.raises(UnknownSpeakerError, match="aiden, chelsie, ethan"):
            client.chat(GenerateRequest(prompt_token_ids=prompt_of(40, 41), speaker="Ada")).result()


def test_an_answer_of_two_workers_each_is_the_references(tmp_path: Path) -> None:
    write_qwen3_omni(tmp_path / "wide", WIDE)
    with served(tmp_path / "wide", tmp_path, stages=WORKERS) as running:
        check_answer(running, Reference(tmp_path / "wide"))


def check_answer(processes: Processes, reference: Reference, victim: str | None = None) -> None:
    prompt, tokens = prompt_of(40, 41, 42), LONG if victim == "thinker" else TEXT
    request = GenerateRequest(
        prompt_token_ids=prompt,
        # In any case, as in the reference.
        speaker="Chelsie",
        text_sampling=SamplingOverrides(max_tokens=tokens, min_tokens=tokens, temperature=0.0),
        codec_sampling=SamplingOverrides(max_tokens=FRAMES, temperature=0.0),
    )
    heard, codes, text = [], [], []
    # The thinker has the longest part of its text before it.
    awaited = TextEvent if victim == "thinker" else AudioEvent
    with Client(processes.address) as client:
        for event in client.chat(request):
            if isinstance(event, AudioEvent):
                heard.append(event.samples)
            if victim is not None and isinstance(event, awaited):
                processes.kill(victim)
                processes.start(victim)
                victim = None
            if isinstance(event, DoneEvent):
                codes, text = event.codec_token_ids, event.text_token_ids
    spoken = reference.speak(prompt, "chelsie", tokens, FRAMES + 1)
    assert text == spoken.text
    assert codes == [code for frame in spoken.frames for code in frame]
    audio = np.concatenate(heard)
    assert audio.shape == spoken.samples.shape
    assert np.abs(audio - spoken.samples.numpy()).max() < TOLERANCE
