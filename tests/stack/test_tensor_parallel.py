"""Thinker and talker computed by two processes each, against transformers; and what a lost one ends."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from omnirelay import Client
from tests.stack.test_parity import check, prompts, request_for
from tests.support.answers import Reference
from tests.support.processes import wait_until
from tests.support.stack import RunningStack, make_config
from tests.support.workers import TWO, check_gone, shared_names, workers_of

pytestmark = pytest.mark.long

PARALLEL = {"engine": TWO, "threads": 2}


@pytest.fixture(scope="module")
def parallel(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    config = make_config(tiny_checkpoint, stages={"thinker": PARALLEL, "talker": PARALLEL})
    with RunningStack(config, tmp_path_factory.mktemp("parallel")) as running:
        yield running


def stage_of(stack: RunningStack, name: str) -> psutil.Process:
    """The process of a stage."""
    found = [
        each
        for each in psutil.Process(stack.process.pid).children(recursive=True)
        if f"services.{name}" in each.cmdline()
    ]
    return found[0]


def test_answers_of_two_workers_a_stage_equal_the_reference(
    parallel: RunningStack, reference: Reference
) -> None:
    asked = prompts(6, seed=1)[2:]
    with Client(parallel.address) as client:
        check(reference, asked[0], "Ethan", client.chat(request_for(asked[0], "Ethan")).result())
        answers = [client.chat(request_for(prompt, "Chelsie")) for prompt in asked]
        for prompt, answer in zip(asked, answers, strict=True):
            check(reference, prompt, "Chelsie", answer.result())


def test_a_stage_ends_with_a_worker_and_workers_with_their_stage(parallel: RunningStack) -> None:
    talker, thinker = stage_of(parallel, "talker"), stage_of(parallel, "thinker")
    below = {each.pid: workers_of(each.pid) for each in (talker, thinker)}
    assert [len(each) for each in below.values()] == [2, 2]
    below[talker.pid][0].kill()
    check_gone([talker, *below[talker.pid]])
    said = "engine_failed: the talker's engine failed"
    wait_until(lambda: any(said in line for line in parallel.output), said)
    thinker.kill()
    check_gone([thinker, *below[thinker.pid]])
    parallel.stop()
    assert shared_names() == set()
