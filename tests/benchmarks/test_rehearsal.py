"""The rehearsal: what it calls right, when it refuses, and all of it on the tiny checkpoint."""

from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.measure.machine import this_machine
from benchmarks.rehearsal import __main__ as rehearsal
from benchmarks.rehearsal.results import Comparison, Rehearsal, StageRun, report
from omnirelay.errors import OmniRelayError
from shared.messages import STAGES


def compared(difference: float | None) -> Comparison:
    return Comparison(stage="talker", what="tokens", count=3, equal=2, difference=difference, limit=0.1)


def found(*comparisons: Comparison) -> Rehearsal:
    run = StageRun(stage="talker", program="omnirelay", load_s=1.0, run_s=2.0, peak_gib=3.0)
    return Rehearsal(
        size="tiny",
        device="cpu",
        machine=this_machine(),
        made_s=None,
        runs=[run],
        comparisons=list(comparisons),
    )


@pytest.mark.parametrize(("difference", "right"), [(0.0, True), (0.1, True), (0.11, False), (None, False)])
def test_a_difference_passes_up_to_its_limit(difference: float | None, right: bool) -> None:
    result = found(compared(0.0), compared(difference))
    assert result.passed == right
    assert ("FAILED" in report(result)) != right
    assert msgspec.json.decode(msgspec.json.encode(result), type=Rehearsal) == result


def test_nothing_compared_is_nothing_shown() -> None:
    assert not found().passed


def test_tokens_are_forced_and_what_was_likelier_is_noted() -> None:
    from benchmarks.rehearsal.reference import Forced  # noqa: PLC0415 - loads transformers' generation

    scores = torch.tensor([[0.0, 4.0, 2.0, 9.0]])
    forced = Forced([1, 2], drawable=3)
    ids = torch.zeros(1, 1, dtype=torch.long)
    assert [int(forced(ids, scores).argmax()) for _ in range(2)] == [1, 2]
    # The last id is not in question; the others' deviation is 2.
    assert forced.behind == [0.0, 1.0]
    comparison = forced.comparison("talker", torch.float32)
    assert (comparison.count, comparison.equal, comparison.passed) == (2, 1, False)


def test_a_stage_that_does_not_fit_into_memory_is_not_loaded(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rehearsal.available_bytes() > 0
    monkeypatch.setattr(rehearsal, "available_bytes", lambda: rehearsal.LIBRARIES_BYTES)
    with pytest.raises(OmniRelayError, match=r"the thinker needs .* are free"):
        rehearsal.require_memory(tiny_checkpoint, "thinker", "cpu")
    rehearsal.require_memory(tiny_checkpoint, "thinker", "cuda")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_stages_of_the_tiny_checkpoint_equal_transformers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--size", "tiny", "--model", str(tiny_checkpoint), "--out", str(tmp_path)]
    assert rehearsal.main(arguments) == 0
    result = msgspec.json.decode((tmp_path / "tiny-cpu.json").read_bytes(), type=Rehearsal)
    assert [(run.stage, run.program) for run in result.runs] == [
        (stage, program) for stage in STAGES for program in ("omnirelay", "transformers")
    ]
    assert {each.stage for each in result.comparisons} == set(STAGES)
    assert "passed" in (tmp_path / "tiny-cpu.md").read_text(encoding="utf-8")
