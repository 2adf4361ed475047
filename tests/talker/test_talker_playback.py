"""Replies far ahead of their listeners wait for those that are not; what is said does not change."""

import time

from shared.vllm.pieces import FIRST_TOKENS
from tests.support.answers import Reference, random_prompt
from tests.support.talking import TalkerRig


def count(talker: TalkerRig, request_id: str) -> int:
    """Codec tokens made so far."""
    return talker.service._speeches[request_id].made


def test_a_reply_far_ahead_waits_for_a_newcomer(talker: TalkerRig, reference: Reference) -> None:
    ahead, new = (
        reference.answer(
            random_prompt(length, seed=length), thinker_max_new_tokens=20, talker_max_new_tokens=60
        )
        for length in (9, 14)
    )
    talker.take("ahead", ahead)
    for _ in range(5):
        talker.step()
    clock = talker.service._speeches["ahead"].clock
    made = count(talker, "ahead")
    # As if it had been talking for a while.
    clock.due = time.monotonic() + 100
    talker.take("new", new)
    # The newcomer's prompt is computed beside it; from then on the newcomer is alone.
    for _ in range(12):
        talker.step()
    assert count(talker, "ahead") == made + 1
    assert count(talker, "new") == 12
    clock.due = time.monotonic()
    talker.step()
    assert count(talker, "ahead") == made + 2
    talker.run()
    assert talker.codes("ahead") == ahead.codes
    assert talker.codes("new") == new.codes


def test_nobody_waits_when_all_are_far_ahead(talker: TalkerRig, reference: Reference) -> None:
    answer = reference.answer(random_prompt(9, seed=9), thinker_max_new_tokens=20, talker_max_new_tokens=60)
    for name in ("a", "b"):
        talker.take(name, answer)
        talker.service._speeches[name].clock.due = time.monotonic() + 100
    talker.step()
    talker.step()
    assert count(talker, "a") == count(talker, "b") == 2
    talker.run()
    assert talker.codes("a") == talker.codes("b") == answer.codes


def test_a_long_prompt_stops_no_reply_that_is_due(talker: TalkerRig, reference: Reference) -> None:
    spoken, long = (
        reference.answer(
            random_prompt(length, seed=length), thinker_max_new_tokens=20, talker_max_new_tokens=60
        )
        for length in (9, 900)
    )
    talker.take("spoken", spoken)
    for _ in range(3):
        talker.step()
    before = len(talker.steps.scheduled)
    talker.take("long", long)
    while not talker.service._speeches["long"].made:
        # However slow the machine, its listener has something to hear.
        talker.service._speeches["spoken"].clock.due = time.monotonic() + 0.5
        talker.step()
    prompt, *pieces = [step["long"] for step in talker.steps.scheduled[before:]]
    assert prompt == FIRST_TOKENS
    assert prompt + sum(pieces) == 900 + 2
    assert all(step["spoken"] == 1 for step in talker.steps.scheduled[before:])
    talker.run()
    assert talker.codes("spoken") == spoken.codes
    assert talker.codes("long") == long.codes


def test_a_prompt_is_computed_at_once_while_no_reply_is_due(talker: TalkerRig, reference: Reference) -> None:
    answer = reference.answer(
        random_prompt(900, seed=900), thinker_max_new_tokens=20, talker_max_new_tokens=60
    )
    talker.take("long", answer)
    talker.step()
    assert talker.steps.of("long") == [900 + 2]
    talker.run()
