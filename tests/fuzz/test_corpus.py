"""What the fuzzer has found is replayed: nothing of it shows a fault, or takes memory to speak of."""

import logging
import tracemalloc

import pytest

from tests.fuzz.table import TARGETS, Target

MIB = 2**20
MOST_MIB = 2
"""That one input may hold at its worst; measured are 0.2."""


@pytest.fixture(params=TARGETS.values(), ids=lambda target: target.name)
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.param
    return found


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_nothing_that_was_found_shows_a_fault(target: Target) -> None:
    check, seeds = target.load()
    assert target.corpus
    for data in target.kept:
        check(data)
    for seed in seeds():
        check(seed)


def test_no_input_takes_memory_to_speak_of(target: Target) -> None:
    check, _ = target.load()
    largest = sorted(target.kept, key=len)[-12:]
    for data in largest:
        # Once before: what is loaded and remembered for good is not the input's.
        check(data)
    tracemalloc.start()
    try:
        for data in largest:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            check(data)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < MOST_MIB * MIB, (target.name, data)
    finally:
        tracemalloc.stop()
