"""What the talker tells Prometheus moves when it should."""

import itertools

from tests.support.answers import Reference, random_prompt
from tests.support.http import Change, Readings
from tests.support.talking import TalkerRig, rows_of, start_of

OURS = {"stage": "talker"}


def test_rows_held_and_batches_are_told(talker: TalkerRig, reference: Reference) -> None:
    answer = reference.answer(random_prompt(20))
    change = Change(talker.service.collect)
    for name in "ab":
        talker.service.accept(start_of(name, answer))
    for first, second in itertools.zip_longest(rows_of("a", answer, 10), rows_of("b", answer)):
        for message in (first, second):
            if message is not None:
                talker.service.accept(message)
    held = Readings(talker.service.collect())
    assert held("omnirelay_conditioning_rows_held", **OURS) == 2 * answer.rows.shape[0]
    assert held("omnirelay_kv_cache_usage_ratio", **OURS) == 0
    talker.step()
    working = Readings(talker.service.collect())
    assert 0 < working("omnirelay_kv_cache_usage_ratio", **OURS) < 1
    talker.run()
    steps = len([step for step in talker.steps.scheduled if step])
    assert change("omnirelay_stage_batch_requests_count", **OURS) == steps
    assert change("omnirelay_stage_batch_requests_sum", **OURS) == sum(map(len, talker.steps.scheduled))
    assert change("omnirelay_conditioning_rows_held", **OURS) == 0
    assert change("omnirelay_kv_cache_usage_ratio", **OURS) == 0


def test_preemptions_are_told(tight_talker: TalkerRig, reference: Reference) -> None:
    change = Change(tight_talker.service.collect)
    for seed in range(4):
        tight_talker.take(f"r{seed}", reference.answer(random_prompt(125, seed=seed)))
    tight_talker.run()
    assert tight_talker.steps.preemptions.total() > 0
    assert change("omnirelay_preemptions_total", **OURS) >= tight_talker.steps.preemptions.total()
