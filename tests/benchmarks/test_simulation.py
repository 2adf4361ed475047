"""The simulation: against theory, by hand, against itself and against measured loads."""

import random
from collections.abc import Generator, Sequence
from pathlib import Path
from statistics import mean

import msgspec
import pytest
import simpy

from benchmarks.gateway.measure import GatewayResult, Latency, StreamLevel
from benchmarks.measure.machine import this_machine
from benchmarks.measure.results import read
from benchmarks.measure.workload import Workload, answer_of
from benchmarks.simulation import plan as planning
from benchmarks.simulation.__main__ import main, streams_of_a_gateway
from benchmarks.simulation.check import check
from benchmarks.simulation.plan import enlarged, fewest, plans, reached, scaled
from benchmarks.simulation.replicas import BatchServer
from benchmarks.simulation.stack import Outcome, Replicas, Speakers, simulate
from benchmarks.simulation.step_times import StepTime, StepTimes, chunk_targets, fit
from benchmarks.simulation.stream import BLOCK_S, Stream
from omnirelay.errors import OmniRelayError
from tests.gateway.conftest import ROOT

RESULTS = ROOT / "benchmarks" / "results"
SHORT = answer_of(2.4)
QUICK = StepTimes(
    thinker=StepTime(step_s=0.005, unit_s=0.001),
    talker=StepTime(step_s=0.003, unit_s=0.0005),
    token2wav=StepTime(step_s=0.02, unit_s=0.01),
)


class SingleServer(BatchServer[float]):
    """One job at a time, with random times; jobs are the times at which they came."""

    def __init__(self, env: simpy.Environment, chance: random.Random, rate: float) -> None:
        super().__init__(env)
        self.spent: list[float] = []
        self._chance = chance
        self._rate = rate

    def batch(self) -> Sequence[float]:
        return self.jobs[:1]

    def duration(self, batch: Sequence[float]) -> float:
        assert len(batch) == 1
        return self._chance.expovariate(self._rate)

    def finish(self, batch: Sequence[float]) -> None:
        for job in batch:
            self.jobs.remove(job)
            self.spent.append(self.env.now - job)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_queue_with_one_server_is_that_of_theory(load: float) -> None:
    """M/M/1: a job spends 1 / (service rate - arrival rate), and the server works for the load's share."""
    env, chance = simpy.Environment(), random.Random(1)
    server = SingleServer(env, chance, 1.0)

    def arrive() -> Generator[simpy.Event, object, None]:
        while True:
            yield env.timeout(chance.expovariate(load))
            server.add(env.now)

    env.process(arrive())
    env.run(until=60_000)
    assert mean(server.spent) == pytest.approx(1 / (1 - load), rel=0.06)
    assert server.busy_s / env.now == pytest.approx(load, rel=0.03)
    assert server.steps == len(server.spent)


def test_one_answer_is_as_counted_by_hand() -> None:
    times = StepTimes(
        thinker=StepTime(step_s=0.01, unit_s=0.0),
        talker=StepTime(step_s=0.001, unit_s=0.0),
        token2wav=StepTime(step_s=0.1, unit_s=0.0),
    )
    workload = Workload(prompt_tokens=10, text_tokens=30, codec_tokens=48)
    speakers = Speakers(count=1, workload=workload, hear=False, rounds=1)
    (answer,) = simulate(times, Replicas(), speakers, hop_s=0.0).answers
    assert answer.ttft_s == pytest.approx(0.01)
    # The 24th codec token, of two blocks, follows the 24th of text.
    assert answer.ttfa_s == pytest.approx(24 * 0.01 + 0.001 + 0.1)
    # Meanwhile all are there (30 * 10 ms and 18 more of 1 ms), so that the rest is one chunk.
    assert answer.completion_s == pytest.approx(answer.ttfa_s + 0.1)
    assert answer.silent_s == 0.0


def test_a_listener_without_sound_waits() -> None:
    stream = Stream(answer_of(10), asked=0.0)
    stream.take_audio(1, 1.0)
    assert stream.slack_s(2 * BLOCK_S, 1.1) == pytest.approx(2 * BLOCK_S - 0.1)
    stream.take_audio(2, 1.0 + BLOCK_S + 0.5)
    assert stream.silent_s == pytest.approx(0.5)
    stream.take_audio(8, 1.0 + BLOCK_S + 0.6)
    assert stream.silent_s == pytest.approx(0.5)
    assert stream.done is None


@pytest.mark.parametrize("count", [1, 3, 20, 60])
def test_nothing_is_lost_and_nobody_works_more_than_all_the_time(count: int) -> None:
    found = simulate(QUICK, Replicas(talker=2), Speakers(count=count, workload=SHORT, pause_s=0.5), 20.0)
    assert found.asked == len(found.answers) + found.open
    assert found.open <= count
    assert found.answers
    assert all(0 < share <= 1 for share in found.busy.values())
    for each in found.answers:
        assert each.asked <= found.seconds
        assert 0 < each.ttft_s < each.ttfa_s < each.completion_s
        assert each.silent_s >= 0


def test_each_round_is_answered() -> None:
    found = simulate(QUICK, Replicas(), Speakers(count=3, workload=SHORT, rounds=2, at_least=8))
    assert (found.asked, len(found.answers), found.open) == (8, 8, 0)


def test_the_same_seed_gives_the_same_outcome() -> None:
    def run(seed: int) -> Outcome:
        return simulate(QUICK, Replicas(), Speakers(count=5, workload=SHORT, pause_s=1.0), 20.0, seed)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_more_replicas_do_not_slow_and_more_speakers_do_not_speed_up() -> None:
    def ttfa(count: int, replicas: Replicas) -> float:
        speakers = Speakers(count=count, workload=SHORT, hear=False)
        return simulate(QUICK, replicas, speakers, 30.0).after(5.0).ttfa_s(0.5)

    times = [ttfa(count, Replicas()) for count in (1, 4, 16, 48)]
    assert times == sorted(times)
    more = [ttfa(16, Replicas(thinker=n, talker=n, token2wav=n)) for n in (1, 2, 4, 16)]
    assert more == sorted(more, reverse=True)
    assert more[-1] == pytest.approx(ttfa(1, Replicas()), rel=0.01)


def test_a_faster_machine_needs_less() -> None:
    speakers = Speakers(count=1, workload=SHORT, hear=False, rounds=1)
    slow, fast = (
        simulate(times, Replicas(), speakers, hop_s=0.0).answers[0] for times in (QUICK, QUICK.faster(2))
    )
    assert fast.ttft_s == pytest.approx(slow.ttft_s / 2)
    assert fast.ttfa_s == pytest.approx(slow.ttfa_s / 2)


def test_chunks_tile_a_stream() -> None:
    assert chunk_targets(42) == [1, 2, 4, 8, 8, 8, 8, 3]
    assert all(sum(chunk_targets(blocks)) == blocks for blocks in range(50))


@pytest.mark.parametrize("size", ["tiny", "small", "bench"])
def test_simulated_loads_are_like_those_that_were_measured(size: str) -> None:
    """The bounds are those that docs/scaling.md states."""
    run = read(RESULTS / f"{size}.json")
    times = fit(run)
    for each in check(run, times):
        assert abs(each.ttfa_s.error) <= 0.17
        assert abs(each.completion_s.error) <= 0.1
        assert abs(each.requests_per_s.error) <= 0.1


def test_step_times_need_two_loads() -> None:
    run = read(RESULTS / "tiny.json")
    run.loads[:] = [each for each in run.loads if each.adapter == "omnirelay"][:1]
    with pytest.raises(OmniRelayError, match="two loads"):
        fit(run)


def test_as_few_replicas_as_are_enough() -> None:
    def enough(replicas: Replicas) -> bool:
        return replicas.thinker >= 2 and replicas.talker >= 3 and replicas.token2wav >= 21

    wanted = Replicas(thinker=2, talker=3, token2wav=21)
    assert fewest(enough, Replicas(thinker=40, talker=40, token2wav=40)) == wanted
    assert fewest(lambda _: True, Replicas(thinker=5, talker=5, token2wav=5)) == Replicas()
    found = enlarged(enough, Replicas(), 100)
    assert found is not None
    assert enough(found)
    assert enlarged(lambda _: False, Replicas(), 4) is None


def test_a_plan_reaches_its_goal_and_none_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SECONDS", 30.0)
    one, many = plans(QUICK, [1, 4])
    assert one.replicas == Replicas()
    assert many.replicas is not None
    assert many.ttfa_p95_s < planning.TTFA_S
    assert many.silent == 0
    assert scaled([one, many], 11) == Replicas(
        thinker=3 * many.replicas.thinker,
        talker=3 * many.replicas.talker,
        token2wav=3 * many.replicas.token2wav,
    )
    (slow,) = plans(QUICK.faster(0.1), [1])
    assert slow.replicas is None
    assert scaled([slow], 30) is None


def test_no_answer_is_no_success() -> None:
    assert not reached(Outcome(seconds=1.0, asked=1, answers=[], open=1, busy={}))


def level(streams: int, p99: float, interface: str = "tcp") -> StreamLevel:
    latency = Latency(p50=p99 / 2, p99=p99, most=p99)
    return StreamLevel(
        interface="tcp" if interface == "tcp" else "http",
        streams=streams,
        seconds=1.0,
        events_per_s=1.0,
        cpu=0.5,
        cpu_us_per_event=1.0,
        bytes_per_stream=1.0,
        text=latency,
        audio=latency,
        every=latency,
        stages_cpu=0.5,
        others_cpu=0.0,
    )


def test_a_gateway_counts_for_the_streams_that_it_held_in_time(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    assert streams_of_a_gateway(path) is None
    levels = [level(100, 0.001), level(2000, 0.008), level(4000, 0.5), level(3000, 0.001, "http")]
    result = GatewayResult(machine=this_machine(), streams=levels, replicas=[])
    path.write_bytes(msgspec.json.encode(result))
    assert streams_of_a_gateway(path) == 2000


def test_the_command_writes_tables_and_a_picture(tmp_path: Path) -> None:
    given = ["--sizes", "tiny", "--speakers", "1", "2", "--faster", "--out", str(tmp_path)]
    assert main([*given, "--results", str(RESULTS)]) == 0
    text = (tmp_path / "scaling.md").read_text(encoding="utf-8")
    assert "| 1,000,000 | 1,000,000 |" in text or "| 1,000,000 | 500,000 |" in text
    assert "nan" not in text
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert main([*given, "--results", str(tmp_path / "missing")]) == 1
