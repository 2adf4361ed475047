"""Thinker, talker and code2wav together say what transformers says, from a prompt to the last sample."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from checkpoint.qwen3_omni import TINY, Qwen3Shape, write_qwen3_omni
from services.families.qwen3_omni import QWEN3_OMNI
from shared.messages import ThinkRequest
from tests.qwen3_omni.test_thinker_media import Qwen3Processor
from tests.qwen3_omni.tiny import Reference, Spoken, prompt_of
from tests.support.conversations import examples
from tests.support.edges import MakeEdge
from tests.support.pipeline import STAGES, Held, Pipeline
from tests.support.thinking import speech_of, thinker_request

TEXT, FRAMES = 6, 14
TOLERANCE = 1e-4
SEED = 2
"""With it the prompts have answers of their own."""
SHAPES: dict[str, Qwen3Shape] = {
    "embeddings accepted": replace(
        TINY, accepted_layer=0, groups=3, audio={**TINY.audio, "n_window_infer": 400}
    ),
    "last layer accepted": replace(
        TINY, accepted_layer=4, groups=6, text={**TINY.text, "mlp_only_layers": [1, 2]}
    ),
}


@dataclass(frozen=True)
class Whole:
    """A checkpoint, served and in transformers."""

    pipeline: Pipeline
    reference: Reference
    processor: Qwen3Processor

    def check(self, request: ThinkRequest, spoken: Spoken, held: Held) -> None:
        assert held.is_complete(request)
        assert held.text == spoken.text
        assert held.codes == [code for frame in spoken.frames for code in frame]
        audio = np.frombuffer(b"".join(held.audio), np.float32)
        assert audio.shape == spoken.samples.shape
        assert np.abs(audio - spoken.samples.numpy()).max() < TOLERANCE

    def answer(self, request: ThinkRequest) -> Held:
        held = Held()
        self.pipeline.begin(request)
        self.pipeline.finish(held)
        return held


@pytest.fixture(scope="session", params=SHAPES)
def whole(
    request: pytest.FixtureRequest,
    experts: None,
    tmp_path_factory: pytest.TempPathFactory,
    make_edge: MakeEdge,
) -> Whole:
    directory = tmp_path_factory.mktemp("shape")
    write_qwen3_omni(directory, SHAPES[request.param], seed=SEED)
    pipeline = Pipeline(directory, make_edge, QWEN3_OMNI)
    return Whole(pipeline, Reference(directory), Qwen3Processor(directory))


def request_of(name: str, prompt: list[int], voice: str = "ethan", **fields: Any) -> ThinkRequest:
    speech = speech_of(voice, max_tokens=FRAMES, chunk_frames=(1, 2, 4))
    return thinker_request(name, prompt, speech=speech, max_tokens=TEXT, min_tokens=TEXT, **fields)


def test_text(whole: Whole) -> None:
    found = set()
    prompts = {"ethan": prompt_of(40, 41), "chelsie": prompt_of(*range(50, 90), system=7)}
    for voice, prompt in prompts.items():
        request = request_of(voice, prompt, voice)
        spoken = whole.reference.speak(prompt, voice, TEXT, FRAMES + 1)
        whole.check(request, spoken, whole.answer(request))
        found.add(str(spoken.frames))
    assert len(found) == len(prompts), "equal answers are no test"


@pytest.mark.parametrize("name", ["audio", "everything, with two videos' sound", "three turns"])
def test_media(whole: Whole, name: str) -> None:
    conversation = examples()[name]
    heard = conversation.use_audio_in_video
    inputs: dict[str, Any] = dict(whole.processor.inputs(conversation))
    prompt = inputs.pop("input_ids")[0].tolist()
    del inputs["attention_mask"]
    spoken = whole.reference.speak(prompt, "ethan", TEXT, FRAMES + 1, **inputs, use_audio_in_video=heard)
    request = request_of(
        "media", whole.processor.prompt(conversation), media=conversation.media, use_audio_in_video=heard
    )
    whole.check(request, spoken, whole.answer(request))


@pytest.mark.parametrize("steps", [1, 3, 8, 15, 30])
def test_an_answer_is_lost_and_resumed(whole: Whole, steps: int) -> None:
    prompt = prompt_of(40, 41)
    request = request_of("lost", prompt)
    spoken = whole.reference.speak(prompt, "ethan", TEXT, FRAMES + 1)
    held = Held()
    whole.pipeline.begin(request)
    for _ in range(steps):
        for stage in STAGES:
            whole.pipeline.step(stage)
    for stage in STAGES:
        whole.pipeline.deliver(stage, held)
    whole.pipeline.lose()
    if not held.is_complete(request):
        whole.pipeline.begin(held.resume(request, "again"))
        whole.pipeline.finish(held)
    whole.check(request, spoken, held)
