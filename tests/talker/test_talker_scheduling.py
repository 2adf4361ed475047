"""Who is spoken when: by the clocks of listeners, suspects alone, none that is held; what is told of it."""

import itertools
import time

import msgspec
import pytest

from omnirelay.errors import RepeatedMessageError, SequenceError
from shared.messages import Route
from tests.support.answers import Reference, random_prompt
from tests.support.http import Change, Readings
from tests.support.talking import TalkerRig, ask, check_codes, rows_of, start_of
from tests.support.thinking import speech_of


def test_a_held_request_waits_and_ends_as_it_would_have(
    talker: TalkerRig, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: set[str] = set()
    # Before the requests begin: each remembers whom it asks.
    monkeypatch.setattr(talker.service._following, "stalls", held.__contains__, raising=False)
    answers = {name: ask(reference, 33, seed) for seed, name in enumerate(("held", "later", "free"))}
    talker.take("held", answers["held"])
    talker.advance(3)
    made = talker.codes("held")
    assert 0 < len(made) < len(answers["held"].codes)
    held |= {"held", "later"}
    assert not talker.service.ready
    talker.take("later", answers["later"])
    assert not talker.service.ready
    talker.take("free", answers["free"])
    talker.settle()
    assert talker.finished == ["free"]
    assert talker.codes("held") == made
    assert talker.codes("later") == []
    held.clear()
    talker.run()
    check_codes(talker, answers)


def test_requests_without_rows_give_their_places_to_one_that_has_them(
    pair_talker: TalkerRig, reference: Reference
) -> None:
    answers = {name: ask(reference, 33, seed) for seed, name in enumerate(("slow", "slower", "whole"))}
    late = []
    for name in ("slow", "slower"):
        first, *rest = rows_of(name, answers[name], answers[name].prompt_positions + 2)
        pair_talker.service.accept(start_of(name, answers[name]))
        pair_talker.service.accept(first)
        late += rest
    pair_talker.settle()
    made = {name: pair_talker.codes(name) for name in ("slow", "slower")}
    assert all(made.values())
    before = len(pair_talker.steps.scheduled)
    pair_talker.take("whole", answers["whole"])
    pair_talker.settle()
    assert pair_talker.finished == ["whole"]
    assert {name: pair_talker.codes(name) for name in ("slow", "slower")} == made
    # One of them was enough, and no step went by without work.
    assert sum(pair_talker.steps.preemptions.values()) == 1
    assert all(pair_talker.steps.scheduled[before:-1])
    pair_talker.accept(*late)
    pair_talker.run()
    check_codes(pair_talker, answers)


def test_a_request_that_can_run_keeps_the_places_of_those_that_wait_for_a_row(
    pair_talker: TalkerRig, reference: Reference
) -> None:
    answers = [ask(reference, 33, seed) for seed in range(3)]
    first, rest = rows_of("slow", answers[0], answers[0].prompt_positions + 2)
    pair_talker.service.accept(start_of("slow", answers[0]))
    pair_talker.service.accept(first)
    pair_talker.take("one", answers[1])
    while pair_talker.codes("one") != answers[1].codes[:5]:
        assert pair_talker.step() == {}
    pair_talker.take("two", answers[2])
    pair_talker.advance(3)
    pair_talker.service.accept(rest)
    pair_talker.run()
    assert not pair_talker.steps.preemptions
    assert pair_talker.codes("slow") == answers[0].codes


def test_a_suspect_is_computed_alone_while_it_has_rows(talker: TalkerRig, reference: Reference) -> None:
    answers = {name: ask(reference, 33, seed) for seed, name in enumerate(("innocent", "suspect"))}
    talker.take("innocent", answers["innocent"])
    route = Route(thinker="a", talker="b", token2wav="c", alone=("talker",))
    talker.service.accept(msgspec.structs.replace(start_of("suspect", answers["suspect"]), route=route))
    first, *rest = rows_of("suspect", answers["suspect"], answers["suspect"].prompt_positions + 2)
    talker.service.accept(first)
    turns = []
    while talker.service.active_requests():
        turns.append(talker.service.take_turn())
        if len(turns) == 6:
            talker.service.accept(rest[0])
        assert talker.step() == {}
        if turns[-1] is not None:
            assert list(talker.steps.scheduled[-1]) == ["suspect"]
    assert turns[:8] == [*["suspect"] * 3, None, None, None, "suspect", "suspect"]
    check_codes(talker, answers)


def count(talker: TalkerRig, request_id: str) -> int:
    """Codec tokens made so far."""
    return talker.service._speeches[request_id].made


def test_a_reply_far_ahead_waits_for_a_newcomer(talker: TalkerRig, reference: Reference) -> None:
    ahead, new = (ask(reference, length, length) for length in (9, 14))
    talker.take("ahead", ahead)
    talker.advance(5)
    clock = talker.service._speeches["ahead"].clock
    made = count(talker, "ahead")
    # As if it had been talking for a while.
    clock.due = time.monotonic() + 100
    talker.take("new", new)
    # The newcomer's prompt is computed beside it; from then on the newcomer is alone.
    talker.advance(12)
    assert count(talker, "ahead") == made + 1
    assert count(talker, "new") == 12
    clock.due = time.monotonic()
    talker.step()
    assert count(talker, "ahead") == made + 2
    talker.run()
    assert talker.codes("ahead") == ahead.codes
    assert talker.codes("new") == new.codes


@pytest.mark.parametrize("aborted", [False, True])
def test_rows_behind_the_end_of_speech_are_taken_until_the_last_or_an_abort(
    talker: TalkerRig, reference: Reference, aborted: bool
) -> None:
    answer = ask(reference, 7)
    first, *late = rows_of("short", answer, answer.prompt_positions, answer.prompt_positions + 1)
    start = start_of("short", answer, speech_of(max_tokens=1))
    talker.accept(start, first)
    talker.run()
    assert talker.codes("short") == answer.codes[:1]
    with pytest.raises(RepeatedMessageError):
        talker.service.accept(start)
    if aborted:
        talker.service.abort("short")
    else:
        talker.accept(*late)
        assert late[-1].last
    with pytest.raises(SequenceError, match="not known here"):
        talker.service.accept(late[0 if aborted else -1])
    talker.check_empty()


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
