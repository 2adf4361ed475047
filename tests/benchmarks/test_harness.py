"""The benchmark harness works: a run on the real stack gives a whole and consistent report; never a time."""

import math
import os
import re
from pathlib import Path

import msgspec
import pytest

from benchmarks.__main__ import main
from benchmarks.measure.load import Load
from benchmarks.measure.results import RunResult, read
from benchmarks.report import figures, levels_of, loads_of
from shared.messages import STAGES

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``--quick`` writes."""
    folder = tmp_path_factory.mktemp("results")
    assert main(["--quick", "--size", "tiny", "--out", str(folder), "--name", "quick"]) == 0
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> RunResult:
    return read(folder / "quick-tiny.json")


def test_tables_are_written(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {"quick-tiny.json", "quick-tiny.md"}
    report = (folder / "quick-tiny.md").read_text(encoding="utf-8")
    assert "are equal in all" in report
    assert "nan" not in report
    rows = [line.count("|") for line in report.splitlines() if line.startswith("|")]
    assert len(rows) > 30


def test_the_machine_is_named_but_not_whose_it_is(folder: Path, result: RunResult) -> None:
    assert result.machine.cpu
    assert result.machine.cores >= 1
    assert {"python", "torch", "transformers"} <= result.machine.versions.keys()
    for path in folder.glob("quick-tiny.*"):
        text = path.read_text(encoding="utf-8")
        assert os.uname().nodename not in re.findall(r"[\w.-]+", text) or len(os.uname().nodename) < 3
        assert str(Path.home()) not in text
        assert str(Path.cwd()) not in text


def test_both_servers_answered_all_requests_equally(result: RunResult) -> None:
    assert result.unequal == []
    assert result.compared == 2
    assert levels_of(result, "omnirelay") == [1, 2]
    assert levels_of(result, "transformers") == [1]
    assert [(load.adapter, load.clients, len(load.answers)) for load in result.loads] == [
        ("transformers", 1, 1),
        ("omnirelay", 1, 3),
        ("omnirelay", 2, 3),
    ]


def test_answers_have_the_forced_lengths(result: RunResult) -> None:
    for load in result.loads:
        for answer in load.answers:
            assert answer.text_tokens == load.workload.text_tokens
            assert answer.codec_tokens == load.workload.codec_tokens
            assert answer.audio_s == pytest.approx(load.workload.seconds)
            assert 0 < answer.ttft_s <= answer.ttfa_s <= answer.completion_s <= load.wall_s
            assert answer.real_time_factor == pytest.approx(answer.completion_s / answer.audio_s)
            assert (answer.underruns == 0) == (answer.stalled_s == 0)


def test_a_loops_activities_make_up_its_time(result: RunResult) -> None:
    for load in loads_of(result, "omnirelay"):
        assert [stage.name for stage in load.stages] == list(STAGES)
        for stage in load.stages:
            assert min(stage.seconds.values()) > 0
            # The readings enclose the load; an idle loop counts when it next comes round.
            assert sum(stage.seconds.values()) == pytest.approx(load.wall_s, abs=2.0)
            assert stage.steps > 0
            assert 1 <= stage.mean_batch <= load.clients
        talker = load.stages[1]
        codecs = sum(answer.codec_tokens for answer in load.answers)
        assert talker.steps * talker.mean_batch >= codecs


def test_memory_of_every_process_is_told(result: RunResult) -> None:
    def processes(load: Load) -> set[str]:
        assert set(load.cpu_s) == set(load.peak_memory)
        assert sum(load.cpu_s.values()) > 0
        assert 0 <= load.others_cpu <= 1
        assert min(load.peak_memory.values()) > 10 * 2**20
        return set(load.peak_memory)

    assert {frozenset(processes(load)) for load in loads_of(result, "omnirelay")} == {
        frozenset({"gateway", *STAGES})
    }
    assert {frozenset(processes(load)) for load in loads_of(result, "transformers")} == {
        frozenset({"transformers"})
    }


def test_a_hop_is_the_sum_of_its_parts(result: RunResult) -> None:
    plain, busy = ["one row", "a prompt of 21 MB"], "a chunk while 3 processes compute"
    hops = result.measured["hops"]
    assert [hop.name for hop in hops] == [*plain, *(f"{message}, CURVE" for message in plain), busy]
    for hop in hops:
        parts = zip(*(hop.values[f"{each}, ms"] for each in ("encode", "wire", "decode", "all")), strict=True)
        assert all(min(each) > 0 and math.isclose(sum(each[:3]), each[3]) for each in parts)
    assert hops[1].p50("bytes") > 21_000_000


def test_stages_are_measured_alone(result: RunResult) -> None:
    assert [each.name for each in result.measured["synthesis"]] == ["1 s", "2 s"]
    assert [each.name for each in result.measured["floor"]] == ["vllm", "talker"]
    for each in (*result.measured["synthesis"], *result.measured["floor"]):
        assert all(min(values) > 0 for values in each.values.values())


def test_every_figure_is_a_number(result: RunResult) -> None:
    told = list(figures(result))
    assert len({figure.name for figure in told}) == len(told) > 10
    assert all(math.isfinite(figure.value) and figure.value > 0 for figure in told)
    assert {figure.verdict for figure in told} <= {"", "reached", "missed"}


def test_answers_that_differ_are_told_loudly(
    result: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    differing = msgspec.structs.replace(result, unequal=["omnirelay, 1 at once, prompt 0: codec_ids differ"])

    async def measured(*_: object) -> RunResult:
        return differing

    monkeypatch.setattr("benchmarks.__main__.measure", measured)
    assert main(["--size", "tiny", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "**ANSWERS DIFFER:**" in told.out
    assert "omnirelay, 1 at once, prompt 0: codec_ids differ" in told.out
    assert "THE SERVERS' ANSWERS DIFFER" in told.err


@pytest.mark.parametrize("scenario", ["real-time", "questions"])
def test_other_scenarios_run_to_their_end(scenario: str, tmp_path: Path) -> None:
    given = ["--quick", "--size", "tiny", "--scenarios", scenario, "--out", str(tmp_path)]
    assert main(given) == 0
    rows = read(tmp_path / f"tiny-{scenario}.json").measured[scenario]
    assert all(math.isfinite(value) for row in rows for each in row.values.values() for value in each)
