"""The parts of ``make gpu``, tried on a CPU; and which of them run, are kept and are run again."""

import importlib.util
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.part import PARTS
from benchmarks.gpu.report import report
from benchmarks.gpu.results import FinishedPart, PartResult, Settings, Table
from benchmarks.gpu.sampling import Sampler
from benchmarks.measure.machine import this_machine

SETTINGS = Settings(device="cpu", checkpoint="tiny", model="DIR", clients=[1, 2], seconds=2.56)
GOOD = PartResult(
    tables=[Table(title="Times", columns=["what", "s"], rows=[["a step", 0.12345], ["b", None]])]
)
BAD = PartResult(tables=[], problems=["it differs"])


def finished(name: str, result: PartResult = GOOD, settings: Settings = SETTINGS) -> FinishedPart:
    return FinishedPart(name=name, settings=settings, result=result, wall_s=3.0)


def run(monkeypatch: pytest.MonkeyPatch, model: Path, out: Path, *arguments: str) -> tuple[int, list[str]]:
    """Run the command without its parts; gives its status and the parts that it would have run."""
    ran: list[str] = []

    def pretend(name: str, settings: Settings) -> FinishedPart | str:
        ran.append(name)
        if name == "load":
            return "ended with exit status 1"
        return finished(name, BAD if name == "kill" else GOOD, settings)

    monkeypatch.setattr(command, "run_part", pretend)
    chosen = ["--device", "cpu", "--checkpoint", "tiny", "--model", str(model), "--out", str(out)]
    return command.main([*arguments, *chosen]), ran


def test_parts_that_passed_are_kept_and_others_run_again(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, ran = run(monkeypatch, tiny_checkpoint, tmp_path)
    assert (status, ran) == (1, list(PARTS))
    told = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## kill: FAILED" in told
    assert "- it differs" in told
    assert "- load: ended with exit status 1" in told
    assert "| a step | 0.1235 |" in told
    assert {"parts", "missing"} == msgspec.json.decode((tmp_path / "report.json").read_bytes()).keys()
    status, ran = run(monkeypatch, tiny_checkpoint, tmp_path)
    assert (status, ran) == (1, ["load", "kill"])
    assert run(monkeypatch, tiny_checkpoint, tmp_path, "bare", "parity") == (0, [])
    assert run(monkeypatch, tiny_checkpoint, tmp_path, "bare", "--again") == (0, ["bare"])
    assert run(monkeypatch, tiny_checkpoint, tmp_path, "bare", "--clients", "3") == (0, ["bare"])


def test_a_part_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["speed", "--out", str(tmp_path)])
    assert "there is no part speed; there are bare, parity, steps, load, kill" in capsys.readouterr().err


def test_without_vllm_only_the_bare_models_run(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        assert sampler._process is not None
        sampler._process.wait(60)
    (table,) = sampler.tables()
    assert table.rows == [["0", 2, 75.0, 100.0, 2000.0, 3000.0, 250.5, 300.5]]
    with Sampler(str(tmp_path / "none")) as sampler:
        pass
    assert sampler.tables() == []


def test_a_report_names_the_device_and_what_was_not_run() -> None:
    told = report(this_machine(), "Some GPU", [finished("bare")], ["kill: no time"])
    assert told.startswith("# Some GPU\n")
    assert "## bare: passed" in told
    assert "- kill: no time" in told


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_bare_models_equal_transformers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["bare", "--device", "cpu", "--checkpoint", "tiny", "--model", str(tiny_checkpoint)]
    assert command.main([*arguments, "--out", str(tmp_path)]) == 0
    kept = msgspec.json.decode((tmp_path / "bare.json").read_bytes(), type=FinishedPart)
    assert kept.result.problems == []
    assert len(kept.result.tables) == 2


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["steps", "load", "kill"])
def test_parts_run_to_their_end_on_a_cpu(part: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """``parity`` is the rehearsal, which has a test of its own."""
    arguments = [part, "--device", "cpu", "--checkpoint", "tiny", "--model", str(tiny_checkpoint)]
    assert command.main([*arguments, "--out", str(tmp_path)]) == 0
