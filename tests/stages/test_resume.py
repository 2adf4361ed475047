"""Requests that are lost anywhere between the stages go on: the answer is that of an undisturbed run."""

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import SpeechSettings, StageName, ThinkRequest
from tests.support.answers import random_prompt
from tests.support.edges import MakeEdge
from tests.support.pipeline import STAGES, Held, Pipeline
from tests.support.thinking import speech_of, thinker_request

NUCLEUS: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.8}
HOT: dict[str, Any] = {"temperature": 1.3}


def streamed(**options: Any) -> SpeechSettings:
    """Speech that is cut as told: samples depend on cuts, and cuts otherwise on time."""
    return speech_of(chunk_frames=[12, 24, 48, 96], **options)


REQUESTS = {
    "greedy": thinker_request("greedy", random_prompt(33), speech=streamed(), max_tokens=20),
    "drawn": thinker_request(
        "drawn", random_prompt(9), speech=streamed(seed=5, **NUCLEUS), seed=5, max_tokens=20, **NUCLEUS
    ),
    "drawn from everything": thinker_request(
        "hot",
        random_prompt(50),
        speech=streamed(seed=6, min_tokens=50, **HOT),
        seed=6,
        max_tokens=20,
        min_tokens=15,
        **HOT,
    ),
    "speech ends early": thinker_request(
        "early", random_prompt(20), speech=streamed(max_tokens=14), min_tokens=40
    ),
    "speech ends late": thinker_request(
        "late", random_prompt(20), speech=streamed(min_tokens=60), max_tokens=3
    ),
    "one piece": thinker_request(
        "piece", random_prompt(20), speech=speech_of(streaming=False), max_tokens=20
    ),
    "one token": thinker_request("short", random_prompt(20), speech=streamed(), max_tokens=1),
    "text only": thinker_request("text", random_prompt(20), **HOT),
}

BYTES_PER_CODE = 480 * 4
Move = tuple[Literal["step", "deliver"], StageName]
moves = st.tuples(st.sampled_from(["step", "step", "step", "deliver"]), st.sampled_from(STAGES))
"""What happens next: messages to the gateway may be late, and are lost with their sender."""


@pytest.fixture(scope="session")
def pipeline(tiny_checkpoint: Path, make_edge: MakeEdge) -> Pipeline:
    # Until the session ends: an engine that goes takes vLLM's groups of processes from all others.
    return Pipeline(tiny_checkpoint, make_edge)


@pytest.fixture(scope="session")
def undisturbed(pipeline: Pipeline) -> dict[str, Held]:
    answers = {name: Held() for name in REQUESTS}
    for name, request in REQUESTS.items():
        pipeline.begin(request)
        pipeline.finish(answers[name])
        assert answers[name].is_complete(request)
    return answers


def answer(pipeline: Pipeline, request: ThinkRequest, attempts: list[list[Move]]) -> Held:
    """What the gateway has in the end, if all attempts but the last are lost after some moves."""
    held, attempt = Held(), request
    for number, fate in enumerate(attempts, start=1):
        pipeline.begin(attempt)
        for kind, stage in fate:
            if kind == "step":
                pipeline.step(stage)
            else:
                pipeline.deliver(stage, held)
        pipeline.lose()
        if held.is_complete(request):
            return held
        attempt = held.resume(request, f"{request.request_id}.{number}")
    pipeline.begin(attempt)
    pipeline.finish(held)
    return held


def rounds(count: int) -> list[Move]:
    """All stages step and deliver in turn."""
    return [(kind, stage) for _ in range(count) for stage in STAGES for kind in ("step", "deliver")]


@pytest.mark.parametrize("name", REQUESTS)
def test_lost_again_and_again(pipeline: Pipeline, undisturbed: dict[str, Held], name: str) -> None:
    """After ever more: before anything came, among text and codec tokens, and while only audio is missing."""
    attempts = [rounds(count) for count in (0, 1, 2, 4, 9, 15, 30, 40)]
    assert answer(pipeline, REQUESTS[name], attempts) == undisturbed[name]


def test_the_examples_end_in_all_ways(undisturbed: dict[str, Held]) -> None:
    assert {held.text_end for held in undisturbed.values()} == {"stop", "length"}
    assert {held.codes_end for held in undisturbed.values()} == {None, "stop", "length"}
    assert {len(held.audio) for held in undisturbed.values()} >= {0, 1, 3}


@pytest.mark.parametrize("lost", STAGES)
def test_what_one_stage_told_is_lost(
    pipeline: Pipeline, undisturbed: dict[str, Held], lost: StageName
) -> None:
    """So the gateway has audio of codec tokens that it has not, or speech of text that it has not."""
    steps: list[Move] = [("step", stage) for _ in range(60) for stage in STAGES]
    told: list[Move] = [("deliver", stage) for stage in STAGES if stage != lost]
    for name in ("greedy", "drawn", "speech ends early", "one piece"):
        assert answer(pipeline, REQUESTS[name], [steps + told, steps + told]) == undisturbed[name]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(REQUESTS)),
    attempts=st.lists(st.lists(moves, min_size=5, max_size=120), min_size=1, max_size=3),
)
def test_lost_at_any_moment(
    pipeline: Pipeline, undisturbed: dict[str, Held], name: str, attempts: list[list[Move]]
) -> None:
    assert answer(pipeline, REQUESTS[name], attempts) == undisturbed[name]


def test_chunks_that_are_cut_in_time(pipeline: Pipeline) -> None:
    """The ids are those of an undisturbed run, and the samples those of one with the same cuts."""
    speech = speech_of(seed=6, min_tokens=100, max_tokens=100)
    request = thinker_request("timed", random_prompt(9), speech=speech, max_tokens=5)
    held = Held()
    pipeline.begin(request)
    while not held.audio:
        for stage in STAGES:
            pipeline.step(stage)
            pipeline.deliver(stage, held)
    pipeline.lose()
    assert not held.audio_end
    pipeline.begin(held.resume(request, "timed.1"))
    pipeline.finish(held)
    sizes = [max(12, len(chunk) // BYTES_PER_CODE // 12 * 12) for chunk in held.audio]
    cut_as_it_was = msgspec.structs.replace(speech, chunk_frames=sizes)
    undisturbed = Held()
    pipeline.begin(msgspec.structs.replace(request, request_id="told", speech=cut_as_it_was))
    pipeline.finish(undisturbed)
    assert held == undisturbed
    assert len(held.audio) > 2
