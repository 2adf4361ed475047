"""Qwen3-Omni in processes of its own, asked over TCP, while a stage is killed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omnirelay import AudioEvent, Client, DoneEvent, GenerateRequest, SamplingOverrides
from shared.messages import STAGES
from tests.qwen3_omni.tiny import Reference, prompt_of
from tests.support.processes import Processes, wait_until
from tests.support.stack import make_config

pytestmark = pytest.mark.long
TEXT, FRAMES = 6, 40
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def processes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    config = make_config(checkpoint, gateway={"resume_wait_s": 120.0})
    with Processes(config, tmp_path_factory.mktemp("run")) as running:
        for name in ("gateway", *STAGES):
            running.start(name)
        wait_until(running.ready, "the stages are ready")
        yield running


@pytest.mark.parametrize("victim", [None, "talker", "token2wav"])
def test_an_answer_is_the_references(processes: Processes, reference: Reference, victim: str | None) -> None:
    prompt = prompt_of(40, 41, 42)
    request = GenerateRequest(
        prompt_token_ids=prompt,
        # In any case, as in the reference.
        speaker="Chelsie",
        text_sampling=SamplingOverrides(max_tokens=TEXT, min_tokens=TEXT, temperature=0.0),
        codec_sampling=SamplingOverrides(max_tokens=FRAMES, temperature=0.0),
    )
    heard, codes, text = [], [], []
    with Client(processes.address) as client:
        for event in client.chat(request):
            if isinstance(event, AudioEvent):
                heard.append(event.samples)
                if victim is not None and event.seq == 1:
                    processes.kill(victim)
                    processes.start(victim)
            if isinstance(event, DoneEvent):
                codes, text = event.codec_token_ids, event.text_token_ids
    spoken = reference.speak(prompt, "chelsie", TEXT, FRAMES + 1)
    assert text == spoken.text
    assert codes == [code for frame in spoken.frames for code in frame]
    audio = np.concatenate(heard)
    assert audio.shape == spoken.samples.shape
    assert np.abs(audio - spoken.samples.numpy()).max() < TOLERANCE
    wait_until(processes.ready, "the stages are ready again")
