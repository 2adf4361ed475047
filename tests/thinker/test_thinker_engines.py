"""Thinkers of quantised weights, with a quantised KV cache, and one that is computed by two processes."""

from pathlib import Path

import psutil
import pytest
import torch

from shared.vllm.platform import lacks_avx512
from tests.support.answers import Reference, random_prompt
from tests.support.conversations import Processor, examples, expected
from tests.support.quantised import FORMATS, needs_four_bits, quantise
from tests.support.thinking import MakeThinker, ThinkerRig, speech_of, thinker_request
from tests.support.workers import TWO, check_loss, prepare_two, shared_names, workers_of_engine
from tests.thinker.test_thinker_media import check, request_of
from tests.thinker.test_thinker_rows import check_track

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=FORMATS)
def checkpoints(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The tiny checkpoint with a thinker of four bits, and with the weights that these stand for."""
    directory = tmp_path_factory.mktemp("quantised")
    quantise(tiny_checkpoint, request.param, directory / "packed", directory / "plain")
    return directory / "packed", directory / "plain"


def rows_of(rig: ThinkerRig, length: int) -> torch.Tensor:
    """The rows of a prompt that is answered."""
    rig.run(thinker_request("a", random_prompt(length), speech=speech_of(), max_tokens=4))
    return rig.rows("a")[:length].float()


def difference(rows: torch.Tensor, others: torch.Tensor) -> float:
    """How far rows are from others, as a share of these."""
    return float((rows - others).norm() / others.norm())


@needs_four_bits
def test_four_bits_answer_as_the_weights_they_stand_for_in_transformers(
    checkpoints: tuple[Path, Path],
    tiny_checkpoint: Path,
    make_thinker: MakeThinker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With AMX vLLM would quantise what flows through, too, which has an error of its own.
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    directory, plain = checkpoints
    packed, unpacked = (rows_of(make_thinker(each, dtype="bfloat16"), 130) for each in (directory, plain))
    rows, whole = (
        Reference(each)
        .answer(random_prompt(130), thinker_max_new_tokens=4, talker_max_new_tokens=2)
        .rows[:130]
        for each in (plain, tiny_checkpoint)
    )
    # How far bfloat16 is from float32 differs with the processor, so it is measured where the test runs.
    rounding = difference(unpacked, rows)
    assert difference(packed, rows) < 2 * rounding
    # The weights before they were quantised are further off, so the test sees what was loaded.
    assert difference(whole, rows) > 5 * rounding


@pytest.mark.skipif(lacks_avx512(), reason="vLLM's CPU build needs AVX-512 for a cache of FP8")
def test_a_quantised_cache_changes_rows_little(tiny_checkpoint: Path, make_thinker: MakeThinker) -> None:
    plain, quantised = (
        make_thinker(tiny_checkpoint, dtype="bfloat16", kv_cache_dtype=dtype) for dtype in ("auto", "fp8")
    )
    assert quantised.model.conditioning.layer.kv_cache.dtype is torch.bfloat16
    assert 0 < difference(rows_of(quantised, 130), rows_of(plain, 130)) < 0.1


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
