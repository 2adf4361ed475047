"""A second model family is served by the same stages: it is a package, and nothing else changes."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnirelay import AudioEvent, Client, DoneEvent, GenerateRequest, SamplingOverrides
from omnirelay.errors import CheckpointError, UnknownSpeakerError
from services.families.known import FAMILIES, require_family
from shared.messages import STAGES
from tests.family.small import SMALL
from tests.family.small.reference import Answer, SmallReference
from tests.support.children import ROOT, python
from tests.support.processes import Processes, wait_until
from tests.support.stack import make_config

pytestmark = pytest.mark.long
VOCABULARY = 1600
"""Of the tokenizer of the tiny checkpoint."""
TEXT_TOKENS = 12
FRAMES = 21
TOLERANCE = 1e-4


class SmallProcesses(Processes):
    """A gateway and stages that know a family more."""

    def module(self, name: str) -> list[str]:
        """What is run as a process."""
        return ["tests.family.run", name]

    def serves(self) -> bool:
        """All are ready; fails if one has ended."""
        ended = [name for name, process in self.running.items() if process.poll() is not None]
        assert not ended, {name: self.log(name) for name in ended}
        report = self.status()
        return report is not None and report.ready


@dataclass(frozen=True)
class Served:
    """The small family, served and in PyTorch."""

    processes: SmallProcesses
    reference: SmallReference

    @property
    def address(self) -> str:
        return self.processes.address

    def check(self, client: Client, prompt: list[int], voice: str, streaming: bool) -> Answer:
        request = GenerateRequest(
            prompt_token_ids=prompt,
            speaker=voice,
            streaming=streaming,
            text_sampling=SamplingOverrides(max_tokens=TEXT_TOKENS),
            codec_sampling=SamplingOverrides(max_tokens=FRAMES),
        )
        result = client.chat(request).result()
        expected = self.reference.answer(prompt, voice, TEXT_TOKENS, FRAMES)
        assert result.done.text_token_ids == expected.text
        assert result.done.codec_token_ids == expected.codes
        assert result.audio.shape == expected.samples.shape
        assert np.abs(result.audio - expected.samples.numpy()).max() < TOLERANCE
        return expected


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SmallReference]:
    directory = tmp_path_factory.mktemp("small")
    for path in tiny_checkpoint.iterdir():
        if "token" in path.name or "template" in path.name:
            shutil.copy(path, directory)
    reference = SmallReference(VOCABULARY)
    reference.write(directory)
    return directory, reference


@pytest.fixture(scope="module")
def served(model: tuple[Path, SmallReference], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory, reference = model
    engine: dict[str, Any] = {"kv_cache_memory_bytes": 16 * 2**20}
    stages = {
        "thinker": {"engine": engine},
        "talker": {"engine": engine},
        "token2wav": {"engine": {"gpu_memory_utilization": 0.3}},
    }
    config = make_config(directory, stages=stages, gateway={"resume_wait_s": 120.0})
    with SmallProcesses(config, tmp_path_factory.mktemp("run")) as processes:
        for name in ("gateway", *STAGES):
            processes.start(name)
        wait_until(processes.serves, "the stages are ready")
        yield Served(processes, reference)


def test_text_and_speech_are_those_of_the_model_in_pytorch(served: Served) -> None:
    with Client(served.address) as client:
        for length, voice, streaming in ((5, "Ada", True), (1, "Bob", True), (130, "Ada", False)):
            prompt = [(17 * index + length) % 1400 for index in range(length)]
            expected = served.check(client, prompt, voice, streaming)
            # Frames of two ids that differ, or the test would not see them mixed up.
            assert expected.codes[::2] != expected.codes[1::2]


def test_frames_of_two_ids_are_resumed_by_another_talker(served: Served) -> None:
    prompt, frames = [9, 8, 7], 300
    request = GenerateRequest(
        prompt_token_ids=prompt,
        speaker="Bob",
        text_sampling=SamplingOverrides(max_tokens=TEXT_TOKENS),
        codec_sampling=SamplingOverrides(max_tokens=frames),
    )
    with Client(served.address) as client:
        events = []
        for event in client.chat(request):
            if isinstance(event, AudioEvent) and event.seq == 1:
                served.processes.kill("talker")
                served.processes.start("talker")
            events.append(event)
        resumes = client.status().resumes
    expected = served.reference.answer(prompt, "Bob", TEXT_TOKENS, frames)
    done = events[-1]
    assert isinstance(done, DoneEvent)
    assert resumes == 1
    assert done.codec_token_ids == expected.codes
    heard = np.concatenate([event.samples for event in events if isinstance(event, AudioEvent)])
    assert np.abs(heard - expected.samples.numpy()).max() < TOLERANCE


def test_the_gateway_learns_of_the_family_from_its_stages(served: Served) -> None:
    with Client(served.address) as client:
        limits = {stage.name: stage.limits for stage in client.status().stages}
        codec = limits["talker"].codec
        assert codec is not None
        assert (codec.frame_samples, codec.groups, codec.start_positions) == (960, 2, 1)
        assert limits["token2wav"].speakers == ["Ada", "Bob"]
        with pytest.raises(UnknownSpeakerError, match="Ada, Bob"):
            client.chat(GenerateRequest(prompt_token_ids=[1], speaker="alloy")).result()


def test_a_checkpoint_of_no_known_family_is_named(model: tuple[Path, SmallReference]) -> None:
    with pytest.raises(CheckpointError, match="of type 'small_omni'; known: 'qwen2_5_omni'"):
        require_family(model[0])
    assert require_family(model[0], {**FAMILIES, SMALL.model_type: SMALL}) is SMALL


def test_who_asks_for_families_loads_no_engine() -> None:
    code = "import sys, services.families.known; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        python("-c", code), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"
