"""What the harness calls another answer, and what it calls growing memory."""

import numpy as np
import pytest

from tests.chaos.aborts import dropped
from tests.chaos.leaks import Footprint
from tests.chaos.memory import Sample, trend
from tests.chaos.streams import Heard

SOUND = [np.sin(np.arange(100, dtype=np.float32) * (1 + each)) for each in range(3)]


def heard(**changes: object) -> Heard:
    whole = Heard([1, 2], [1, 2], [7, 8], [0, 1, 2], list(SOUND), ended=True)
    for name, value in changes.items():
        setattr(whole, name, value)
    return whole


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"text": [1, 3], "told": [1, 3]}, "text ids differ"),
        ({"told": [1]}, "not that of the end"),
        ({"codes": [7]}, "codec ids differ"),
        ({"seqs": [0, 1, 1]}, "not numbered"),
        ({"chunks": SOUND[:2], "seqs": [0, 1]}, "samples instead of"),
        ({"chunks": [*SOUND[:2], SOUND[2] * np.float32(1 + 1e-6)]}, "chunk 2 differs by up to"),
    ],
)
def test_an_answer_that_differs_is_found(changes: dict[str, object], told: str) -> None:
    assert heard().differences(heard()) == []
    assert told in " ".join(heard(**changes).differences(heard()))


def test_the_beginning_of_an_answer_is_no_departure_from_it_and_something_else_is() -> None:
    part = heard(told=[1], text=[], codes=[], seqs=[0, 1], chunks=SOUND[:2])
    assert part.departures(heard()) == []
    part.told = [2]
    assert part.departures(heard()) == ["the text ids differ"]
    part = heard(told=[1], text=[], codes=[], seqs=[0], chunks=[SOUND[0] + 1])
    assert "chunk 0 differs by up to 1" in part.departures(heard())[0]


@pytest.mark.parametrize(("grown", "flat"), [(0, True), (100 * 2**20, False)])
def test_memory_that_grows_is_not_flat(grown: int, flat: bool) -> None:
    samples = [Sample(at, 1 + (at > 50), 300 * 2**20 + grown * at // 90) for at in range(90)]
    found = trend("thinker", samples)
    assert (found.incarnations, found.flat) == (2, flat)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (Footprint(20, 1, 2**30), []),
        (Footprint(99, 1, 2**30), ["99 descriptors after 20"]),
        (Footprint(20, 3, 2**30), ["3 children after 1"]),
        (Footprint(20, 1, 2**31), ["2048 MiB after 1024"]),
    ],
)
def test_what_is_more_than_it_was_is_told(now: Footprint, told: list[str]) -> None:
    assert now.exceeds(Footprint(20, 1, 2**30), children=2) == told


def test_aborts_are_told_by_the_state_in_which_a_request_was_given_up() -> None:
    log = (
        "12:00:01 INFO gateway gateway.requests: request aa01 cancelled from thinking: cancelled: no\n"
        "12:00:01 DEBUG gateway gateway.dispatch: request aa01 was dropped by all its stages after 0.0120 s\n"
        "12:00:02 DEBUG gateway gateway.dispatch: request bb02 was dropped by all its stages after 1.0000 s\n"
        "12:00:03 INFO gateway gateway.requests: request bb02 expired from talking: deadline_exceeded: late\n"
        "12:00:03 DEBUG gateway gateway.dispatch: request bb02.1 was dropped by all its stages after 0.5 s\n"
        "12:00:04 INFO gateway gateway.requests: request cc03 failed from talking: stage_failed\n"
        "12:00:04 DEBUG gateway gateway.dispatch: request cc03 was dropped by all its stages after 3.0000 s\n"
    )
    assert dropped(log) == {"thinking": [0.012], "talking": [0.5]}
