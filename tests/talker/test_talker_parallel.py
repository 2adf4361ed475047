"""A talker whose model is computed by two processes."""

from pathlib import Path

import pytest

from tests.support.answers import Reference
from tests.support.edges import MakeEdge
from tests.support.talking import TalkerRig
from tests.support.workers import TWO, check_gone, prepare_two, shared_names, workers_of_engine
from tests.talker.test_talker_codes import ask, check


@pytest.mark.long
def test_codes_of_two_workers_are_transformers_codes(
    tiny_checkpoint: Path, reference: Reference, make_edge: MakeEdge
) -> None:
    before = shared_names()
    prepare_two()
    rig = TalkerRig(tiny_checkpoint, make_edge, **TWO)
    workers = workers_of_engine(rig.engine)
    assert len(workers) == 2
    answers = {f"r{length}": ask(reference, length) for length in (1, 7, 130)}
    for name, answer in answers.items():
        rig.take(name, answer)
    rig.run()
    for name, answer in answers.items():
        check(rig, name, answer)
    rig.service.close()
    check_gone(workers)
    assert shared_names() == before
