"""A thinker of quantised weights, and one with a quantised KV cache, beside plain ones."""

from pathlib import Path

import pytest
import torch

from tests.support.answers import Reference, random_prompt
from tests.support.quantised import FORMATS, quantise
from tests.support.thinking import ThinkerRig, speech_of, thinker_request
from tests.thinker.conftest import MakeThinker

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


def test_a_quantised_cache_changes_rows_little(tiny_checkpoint: Path, make_thinker: MakeThinker) -> None:
    plain, quantised = (
        make_thinker(tiny_checkpoint, dtype="bfloat16", kv_cache_dtype=dtype) for dtype in ("auto", "fp8")
    )
    assert quantised.model.conditioning.layer.kv_cache.dtype is torch.bfloat16
    assert 0 < difference(rows_of(quantised, 130), rows_of(plain, 130)) < 0.1
