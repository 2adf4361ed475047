"""The parts of ``make gpu``, tried on a CPU; and which of them run, are kept and are run again."""

import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from vllm.utils.gpu_sync_debug import IMPLICIT_SYNC_ERROR_MESSAGE

from benchmarks.adapters.omnirelay import configuration
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import kill, parity, rehearsal
from benchmarks.gpu.part import PARTS
from benchmarks.gpu.results import FinishedPart, PartResult, Sampler, Settings
from benchmarks.measure.answer import MeasuredAnswer
from benchmarks.measure.results import Table
from checkpoint import BENCH, SMALL, TINY
from checkpoint.config import model_config
from checkpoint.shape import RELEASED_3B, CheckpointShape
from omnirelay.errors import OmniRelayError
from ops.doctor.limits import check_cache
from services.families import memory as sizes
from services.families.known import family_of
from services.families.memory import Model
from shared.config import Config
from shared.model_files import Weights
from tests.support.children import Output, Patch

SETTINGS = Settings(device="cpu", checkpoint="tiny", model="DIR", clients=[1, 2], seconds=2.56)
GOOD = PartResult(
    tables=[Table(title="Times", columns=["what", "s"], rows=[["a step", 0.12345], ["b", None]])]
)
BAD = PartResult(tables=[], problems=["it differs"])


def finished(name: str, result: PartResult = GOOD, settings: Settings = SETTINGS) -> FinishedPart:
    return FinishedPart(name=name, settings=settings, result=result, wall_s=3.0)


def run(monkeypatch: Patch, model: Path, out: Path, *arguments: str) -> tuple[int, list[str]]:
    """Run the command without its parts; gives its status and the parts that it would have run."""
    ran: list[str] = []

    def pretend(name: str, settings: Settings) -> FinishedPart:
        ran.append(name)
        if name == "load":
            raise OmniRelayError("ended with status 1")
        return finished(name, BAD if name == "kill" else GOOD, settings)

    monkeypatch.setattr(command, "run_part", pretend)
    chosen = ["--device", "cpu", "--checkpoint", "tiny", "--model", str(model), "--out", str(out)]
    return command.main([*arguments, *chosen]), ran


def test_parts_that_passed_are_kept_and_others_run_again(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    status, ran = run(monkeypatch, tiny_checkpoint, tmp_path)
    assert (status, ran) == (1, list(PARTS))
    told = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "# kill: FAILED" in told
    assert "- it differs" in told
    assert "- load: ended with status 1" in told
    assert "| a step | 0.123 |" in told
    assert {"parts", "missing"} == msgspec.json.decode((tmp_path / "report.json").read_bytes()).keys()
    status, ran = run(monkeypatch, tiny_checkpoint, tmp_path)
    assert (status, ran) == (1, ["load", "kill"])
    assert run(monkeypatch, tiny_checkpoint, tmp_path, "bare", "parity") == (0, [])
    assert run(monkeypatch, tiny_checkpoint, tmp_path, "bare", "--again") == (0, ["bare"])
    assert run(monkeypatch, tiny_checkpoint, tmp_path, "bare", "--clients", "3") == (0, ["bare"])


def test_a_part_that_is_not_there(tmp_path: Path, capsys: Output) -> None:
    with pytest.raises(SystemExit):
        command.main(["speed", "--out", str(tmp_path)])
    assert "there is no part speed; there are bare, parity, steps, load, kill" in capsys.readouterr().err


def test_without_vllm_only_the_bare_models_run(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    status, ran = run(monkeypatch, tiny_checkpoint, tmp_path)
    assert (status, ran) == (1, ["bare"])
    assert "kill: vLLM is not installed" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_the_gpus_are_sampled(tmp_path: Path) -> None:
    """With a program in the place of the driver's, which ends by itself."""
    program = tmp_path / "nvidia-smi"
    lines = ["0, 50, 1000, 200.5", "0, 100, 3000, 300.5", "1, 0, 10, [N/A]", "0, 10"]
    program.write_text(f"#!{sys.executable}\nprint({chr(10).join(lines)!r}, flush=True)\n", encoding="utf-8")
    program.chmod(0o755)
    with Sampler(str(program)) as sampler:
        assert sampler.process is not None
        sampler.process.wait(60)
    (table,) = sampler.tables()
    assert table.rows == [["0", 2, 75.0, 100.0, 2000.0, 3000.0, 250.5, 300.5]]
    with Sampler(str(tmp_path / "none")) as sampler:
        pass
    assert sampler.tables() == []


@pytest.mark.parametrize(("difference", "right"), [(0.1, True), (0.11, False), (None, False)])
def test_a_difference_passes_up_to_its_limit(difference: float | None, right: bool) -> None:
    from benchmarks.gpu.reference import Comparison  # noqa: PLC0415 - loads transformers

    assert Comparison(what="tokens", count=3, equal=2, difference=difference, limit=0.1).passed == right


def test_tokens_are_forced_and_what_was_likelier_is_noted() -> None:
    from benchmarks.gpu.reference import Forced  # noqa: PLC0415 - loads transformers' generation

    scores = torch.tensor([[0.0, 4.0, 2.0, 9.0]])
    forced = Forced([1, 2], drawable=3)
    ids = torch.zeros(1, 1, dtype=torch.long)
    assert [int(forced(ids, scores).argmax()) for _ in range(2)] == [1, 2]
    # The last id is not in question; the others' deviation is 2.
    assert forced.behind == [0.0, 1.0]
    comparison = forced.comparison(torch.float32)
    assert (comparison.count, comparison.equal, comparison.passed) == (2, 1, False)


def test_a_stage_that_does_not_fit_into_memory_is_not_loaded(
    tiny_checkpoint: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(parity, "LIBRARIES_BYTES", 2**60)
    with pytest.raises(OmniRelayError, match=r"the thinker needs .* are free"):
        parity.require_memory(tiny_checkpoint, "thinker", "cpu")
    parity.require_memory(tiny_checkpoint, "thinker", "cuda")


def test_where_the_host_waits_is_noted(monkeypatch: Patch, capsys: Output) -> None:
    """By what vLLM's check says; other warnings are shown."""
    for name in ("VLLM_GPU_SYNC_CHECK", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    waits = rehearsal.check_steps()
    for said in ("called a synchronizing CUDA operation", f"Tensor.to: {IMPLICIT_SYNC_ERROR_MESSAGE}", "old"):
        warnings.showwarning(said, UserWarning, "/lib/vllm/v1/worker/runner.py", 7)
    assert waits == {"v1/worker/runner.py:7": 2}
    assert "old" in capsys.readouterr().err
    assert os.environ["VLLM_GPU_SYNC_CHECK"] in ("warn", "error")


@pytest.mark.parametrize("shape", [TINY, SMALL, BENCH, RELEASED_3B])
def test_the_longest_request_fits_into_the_cache(shape: CheckpointShape, tmp_path: Path) -> None:
    """As doctor counts: a stage whose cache holds less does not start."""
    written = model_config(shape, 872, "bfloat16" if shape is RELEASED_3B else "float32").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(written), encoding="utf-8")
    config = Config.model_validate(configuration(tmp_path))
    family = family_of(written)
    model = Model(sizes.dtype_of(written), Weights(0, {}), family.paged(written), family.synthesis)
    for on_cpu in (True, False):
        assert [each.level for each in check_cache(config, model, on_cpu)] == ["ok", "ok"]


def answered(codec: list[int], samples: int = 100) -> MeasuredAnswer:
    pieces = [(0.0, samples)]
    rest: dict[str, Any] = {"first_text": 0.0, "start_delay_s": 0.0, "done": 1.0}
    return MeasuredAnswer(index=0, sent=0.0, pieces=pieces, text_ids=[1], codec_ids=codec, **rest)


@pytest.mark.parametrize(
    ("codec", "samples", "exact", "said"),
    [
        (list(range(50)), 100, True, []),
        ([*range(40), *[0] * 10], 100, True, ["the codec_ids are 50, of 50, and differ after 40"]),
        ([*range(40), *[0] * 10], 100, False, []),
        ([*range(10), *[0] * 40], 100, False, ["the answer begins otherwise"]),
        (list(range(49)), 100, False, ["the codec_ids are 49, of 50, and differ after 49"]),
        (list(range(50)), 90, False, ["the samples are 90, of 100"]),
    ],
)
def test_an_answer_without_gap_or_repeat(
    codec: list[int], samples: int, exact: bool, said: list[str]
) -> None:
    assert list(kill.wrong(answered(codec, samples), answered(list(range(50))), exact)) == said


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS)
def test_parts_run_to_their_end_on_a_cpu(part: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """``bare`` and ``parity`` compare with transformers."""
    arguments = [part, "--device", "cpu", "--checkpoint", "tiny", "--model", str(tiny_checkpoint)]
    assert command.main([*arguments, "--out", str(tmp_path)]) == 0
    kept = msgspec.json.decode((tmp_path / f"{part}.json").read_bytes(), type=FinishedPart)
    assert kept.result.tables
