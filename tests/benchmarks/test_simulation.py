"""The simulation: by hand, against itself and against measured loads."""

import math
from pathlib import Path

import pytest
import simpy

from benchmarks import simulation
from benchmarks.measure.results import read
from benchmarks.measure.workload import Workload, answer_of
from benchmarks.simulation import (
    SPEECH_S,
    Outcome,
    Replicas,
    Speakers,
    StepTime,
    Stream,
    Times,
    check,
    chunk_targets,
    enlarged,
    faster,
    fewest,
    fit,
    main,
    plans,
    reached,
    scaled,
    simulate,
)
from omnirelay.errors import OmniRelayError
from shared.messages import STAGES
from tests.support.children import ROOT

RESULTS = ROOT / "benchmarks" / "results"
SHORT = answer_of(2.4)
QUICK: Times = {
    "thinker": StepTime(0.005, 0.001),
    "talker": StepTime(0.003, 0.0005),
    "token2wav": StepTime(0.02, 0.01),
}
ONE: Replicas = dict.fromkeys(STAGES, 1)


def replicas(thinker: int, talker: int, token2wav: int) -> Replicas:
    return {"thinker": thinker, "talker": talker, "token2wav": token2wav}


def test_one_answer_is_as_counted_by_hand() -> None:
    times: Times = {"thinker": StepTime(0.01, 0), "talker": StepTime(0.001, 0), "token2wav": StepTime(0.1, 0)}
    workload = Workload(prompt_tokens=10, text_tokens=30, codec_tokens=48)
    speakers = Speakers(count=1, workload=workload, total=1)
    (answer,) = simulate(times, ONE, speakers).answers
    assert answer.ttft_s == pytest.approx(0.01)
    # The 24th codec token, of two blocks, follows the 24th of text.
    assert answer.ttfa_s == pytest.approx(24 * 0.01 + 0.001 + 0.1)
    # Meanwhile all are there (30 * 10 ms and 18 more of 1 ms), so that the rest is one chunk.
    assert answer.completion_s == pytest.approx(answer.ttfa_s + 0.1)
    assert answer.silent_s == 0.0


def test_a_listener_without_sound_waits() -> None:
    block_s, stream = SPEECH_S["token2wav"], Stream(answer_of(10), 0.0, simpy.Environment().event())
    stream.advance("token2wav", 1, 1.0)
    stream.made["thinker"] = 24
    assert stream.slack_s("thinker", 1.1) == pytest.approx(24 / 50 - 0.1)
    stream.advance("token2wav", 2, 1.0 + block_s + 0.5)
    assert stream.silent_s == pytest.approx(0.5)
    stream.advance("token2wav", 8, 1.0 + block_s + 0.6)
    assert stream.silent_s == pytest.approx(0.5)
    assert math.isnan(stream.completion_s)


@pytest.mark.parametrize("count", [1, 20, 60])
def test_text_comes_before_audio_and_audio_before_the_end(count: int) -> None:
    found = simulate(QUICK, replicas(1, 2, 1), Speakers(count=count, workload=SHORT, pause_s=0.5), 20.0)
    assert found.answers
    for each in found.answers:
        assert each.asked <= found.seconds
        assert 0 < each.ttft_s < each.ttfa_s < each.completion_s
        assert each.silent_s >= 0


def test_as_many_answers_as_were_asked_for_and_the_same_for_a_seed() -> None:
    found = simulate(QUICK, ONE, Speakers(count=3, workload=SHORT, total=8))
    assert len(found.answers) == 8

    def run(seed: int) -> list[float]:
        found = simulate(QUICK, ONE, Speakers(count=5, workload=SHORT, pause_s=1.0), 20.0, seed)
        return [each.asked for each in found.answers]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_more_replicas_and_a_faster_machine_do_not_slow_and_more_speakers_do_not_speed_up() -> None:
    def ttfa(count: int, number: int, speed: float = 1.0) -> float:
        speakers = Speakers(count=count, workload=SHORT, total=10 * count)
        return (
            simulate(faster(QUICK, speed), replicas(number, number, number), speakers).after(1.0).ttfa_p95_s
        )

    times = [ttfa(count, 1) for count in (1, 4, 16, 48)]
    assert times == sorted(times)
    more = [ttfa(16, number) for number in (1, 2, 4, 16)]
    assert more == sorted(more, reverse=True)
    assert more[-1] == pytest.approx(ttfa(1, 1), rel=0.01)
    assert ttfa(1, 1, speed=2.0) == pytest.approx(ttfa(1, 1) / 2, rel=0.01)


def test_chunks_tile_a_stream() -> None:
    assert chunk_targets(42) == [1, 2, 4, 8, 8, 8, 8, 3]
    assert all(sum(chunk_targets(blocks)) == blocks for blocks in range(50))


@pytest.mark.parametrize("size", ["tiny", "small", "bench"])
def test_simulated_loads_are_like_those_that_were_measured(size: str) -> None:
    """The bounds are those that docs/scaling.md states."""
    run = read(RESULTS / f"{size}.json")
    for _, figures in check(run, fit(run)):
        for name, bound in (("first audio, s", 0.17), ("completion, s", 0.1), ("requests/s", 0.1)):
            measured, simulated = figures[name]
            assert simulated == pytest.approx(measured, rel=bound)


def test_step_times_need_two_loads() -> None:
    run = read(RESULTS / "tiny.json")
    run.loads[:] = [each for each in run.loads if each.adapter == "omnirelay"][:1]
    with pytest.raises(OmniRelayError, match="to 1 loads, they need two"):
        fit(run)


def test_as_few_replicas_as_are_enough() -> None:
    wanted = replicas(2, 3, 21)

    def enough(found: Replicas) -> bool:
        return all(found[stage] >= wanted[stage] for stage in STAGES)

    assert fewest(enough, replicas(40, 40, 40)) == wanted
    assert fewest(lambda _: True, replicas(5, 5, 5)) == ONE
    found = enlarged(enough, ONE, 100)
    assert found is not None
    assert enough(found)
    assert enlarged(lambda _: False, ONE, 4) is None


def test_a_plan_reaches_its_goal_and_none_is_made_up() -> None:
    one, many = plans(QUICK, [1, 4], seconds=30.0)
    assert one.replicas == ONE
    assert many.replicas is not None
    assert many.outcome.ttfa_p95_s < simulation.TTFA_S
    assert many.outcome.silent == 0
    assert scaled([one, many], 11) == {stage: 3 * many.replicas[stage] for stage in STAGES}
    (slow,) = plans(faster(QUICK, 0.1), [1, 4], seconds=30.0)
    assert slow.replicas is None
    assert scaled([slow], 30) is None
    assert not reached(Outcome(1.0, [])), "no answer is no success"


def test_the_command_writes_tables(tmp_path: Path) -> None:
    given = ["--sizes", "tiny", "--speakers", "1", "2", "--out", str(tmp_path)]
    assert main([*given, "--results", str(RESULTS)]) == 0
    text = (tmp_path / "scaling.md").read_text(encoding="utf-8")
    assert "| 1,000,000 | 1,000,000 |" in text or "| 1,000,000 | 500,000 |" in text
    assert "nan" not in text
    assert main([*given, "--results", str(tmp_path / "missing")]) == 1
