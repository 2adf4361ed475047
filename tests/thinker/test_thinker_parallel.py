"""A thinker whose model is computed by two processes."""

from pathlib import Path

import psutil
import pytest

from tests.support.answers import Reference, random_prompt
from tests.support.conversations import Processor, examples
from tests.support.thinking import ThinkerRig, speech_of, thinker_request
from tests.support.workers import TWO, check_loss, prepare_two, shared_names, workers_of_engine
from tests.thinker.conftest import MakeThinker
from tests.thinker.test_thinker_media import check, expected, request_of
from tests.thinker.test_thinker_rows import check_track

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def parallel(tiny_checkpoint: Path, make_thinker: MakeThinker) -> ThinkerRig:
    before = shared_names()
    prepare_two()
    rig = make_thinker(tiny_checkpoint, **TWO)
    # Nothing stays of it, however it ends.
    assert shared_names() == before
    return rig


def test_the_rows_are_transformers_rows(parallel: ThinkerRig, reference: Reference) -> None:
    prompts = {"a": random_prompt(7), "b": random_prompt(130), "c": random_prompt(1)}
    parallel.run(*(thinker_request(name, prompt, speech=speech_of()) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        check_track(parallel, name, reference, prompt, speaker="Ethan")
    assert [len(rows) for rows in parallel.engine.collective_rpc("read_rows")] == [2, 0]


def test_media_are_understood_as_by_transformers(
    parallel: ThinkerRig, processor: Processor, reference: Reference
) -> None:
    asked = {f"m{number}": each for number, each in enumerate(examples().values())}
    parallel.run(*(request_of(name, each, processor) for name, each in asked.items()))
    for name, each in asked.items():
        check(parallel, name, expected(each, processor, reference))


def test_no_worker_listens_to_other_machines(parallel: ThinkerRig) -> None:
    heard = {
        each.laddr.ip
        for worker in workers_of_engine(parallel.engine)
        for each in worker.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    assert heard <= {"127.0.0.1", "::1"}


def test_a_stop_signal_to_all_processes_is_left_to_the_stage(parallel: ThinkerRig) -> None:
    for worker in workers_of_engine(parallel.engine):
        worker.terminate()
    parallel.run(thinker_request("after", random_prompt(5), max_tokens=3))
    assert len(parallel.text("after")) == 3


def test_a_lost_worker_ends_the_engine(parallel: ThinkerRig) -> None:
    check_loss(parallel)
