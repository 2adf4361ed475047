"""The rule by which stages get more replicas and fewer."""

from typing import Any

import pytest

from ops.cluster.autoscaling import Autoscaler, Bounds, StackSample, StageSample

BATCH = 8


def look(
    at: float, talker: StageSample, token2wav: StageSample, queued: int = 0, underruns: int = 0
) -> StackSample:
    return StackSample(at, queued, underruns, {"talker": talker, "token2wav": token2wav})


def ready(replicas: int, requests: int) -> StageSample:
    return StageSample(replicas, replicas, requests)


IDLE = ready(1, 0)


@pytest.fixture
def rule() -> Autoscaler:
    return Autoscaler({"talker": Bounds(1, 3, BATCH), "token2wav": Bounds(1, 3, BATCH)}, 10.0, 100.0)


def test_a_full_stage_grows_after_its_time_and_not_before(rule: Autoscaler):
    assert rule.wanted(look(0, ready(1, 7), IDLE)) == {}
    assert rule.wanted(look(9.9, ready(1, 7), IDLE)) == {}
    assert rule.wanted(look(10, ready(1, 7), IDLE)) == {"talker": 2}
    assert rule.wanted(look(11, ready(1, 7), IDLE)) == {}


def test_a_batch_filled_to_the_bound_is_not_short(rule: Autoscaler):
    for at in range(0, 50, 2):
        assert rule.wanted(look(at, ready(1, 6), IDLE)) == {}


def test_a_moment_without_need_starts_the_time_again(rule: Autoscaler):
    rule.wanted(look(0, ready(1, 7), IDLE))
    rule.wanted(look(8, ready(1, 5), IDLE))
    assert rule.wanted(look(10, ready(1, 7), IDLE)) == {}
    assert rule.wanted(look(19.9, ready(1, 7), IDLE)) == {}
    assert rule.wanted(look(20, ready(1, 7), IDLE)) == {"talker": 2}


@pytest.mark.parametrize("signs", [{"queued": [1, 1, 1]}, {"underruns": [1, 2, 3]}])
def test_the_fullest_stage_grows_where_requests_wait_or_listeners_hear_gaps(
    rule: Autoscaler, signs: dict[str, list[int]]
):
    def at(moment: float, index: int) -> dict[Any, int]:
        values = {name: numbers[index] for name, numbers in signs.items()}
        return dict(rule.wanted(look(moment, ready(1, 2), ready(1, 4), **values)))

    # The first look at a counter says nothing of a change.
    rule.wanted(look(-1, ready(1, 2), ready(1, 4)))
    assert at(0, 0) == {}
    assert at(5, 1) == {}
    assert at(10, 2) == {"token2wav": 2}


def test_old_gaps_and_a_gateway_that_counts_from_zero_again_are_no_need(rule: Autoscaler):
    for at, underruns in ((0, 9), (5, 9), (10, 0), (15, 0)):
        assert rule.wanted(look(at, ready(1, 2), IDLE, underruns=underruns)) == {}


def test_no_stage_grows_beyond_its_most(rule: Autoscaler):
    for at in range(0, 50, 2):
        assert rule.wanted(look(at, ready(3, 24), IDLE)) == {}


def test_an_idle_stage_shrinks_to_its_fewest_one_at_a_time(rule: Autoscaler):
    assert rule.wanted(look(0, ready(3, 0), IDLE)) == {}
    assert rule.wanted(look(100, ready(3, 0), IDLE)) == {"talker": 2}
    assert rule.wanted(look(101, ready(2, 0), IDLE)) == {}
    assert rule.wanted(look(201, ready(2, 0), IDLE)) == {"talker": 1}
    assert rule.wanted(look(202, ready(1, 0), IDLE)) == {}
    assert rule.wanted(look(999, ready(1, 0), IDLE)) == {}


@pytest.mark.parametrize(("requests", "shrinks"), [(4, True), (5, False)])
def test_a_stage_shrinks_only_if_the_others_would_be_half_empty(
    rule: Autoscaler, requests: int, shrinks: bool
):
    rule.wanted(look(0, ready(2, requests), IDLE))
    assert rule.wanted(look(100, ready(2, requests), IDLE)) == ({"talker": 1} if shrinks else {})


def test_no_stage_shrinks_while_another_is_short(rule: Autoscaler):
    for at in range(0, 150, 5):
        assert "talker" not in rule.wanted(look(at, ready(2, 0), ready(3, 24)))


def test_a_stage_whose_replicas_are_not_all_ready_stays(rule: Autoscaler):
    for at in range(0, 150, 5):
        assert rule.wanted(look(at, StageSample(2, 1, 16), StageSample(2, 1, 0))) == {}


def test_stages_without_bounds_are_left_alone():
    fixed = Autoscaler({}, 1.0, 1.0)
    for at in range(5):
        assert fixed.wanted(look(at, ready(1, 99), ready(1, 99), queued=9)) == {}
