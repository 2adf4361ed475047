"""A request that cannot run holds neither others nor, where places are short, its place."""

import msgspec
import pytest

from shared.messages import Route
from tests.support.answers import Reference, random_prompt
from tests.support.talking import TalkerRig, rows_of, start_of


def test_a_held_request_waits_and_ends_as_it_would_have(
    talker: TalkerRig, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: set[str] = set()
    # Before the requests begin: each remembers whom it asks.
    monkeypatch.setattr(talker.service._token2wav, "stalls", held.__contains__, raising=False)
    answers = {
        name: reference.answer(random_prompt(33, seed), thinker_max_new_tokens=20, talker_max_new_tokens=60)
        for seed, name in enumerate(("held", "later", "free"))
    }
    talker.take("held", answers["held"])
    for _ in range(3):
        talker.step()
    made = talker.codes("held")
    assert 0 < len(made) < len(answers["held"].codes)
    held |= {"held", "later"}
    assert not talker.service.ready
    talker.take("later", answers["later"])
    assert not talker.service.ready
    talker.take("free", answers["free"])
    while talker.service.ready:
        assert talker.step() == {}
    assert talker.finished == ["free"]
    assert talker.codes("held") == made
    assert talker.codes("later") == []
    held.clear()
    talker.run()
    assert {name: talker.codes(name) for name in answers} == {
        name: answer.codes for name, answer in answers.items()
    }


def test_requests_without_rows_give_their_places_to_one_that_has_them(
    pair_talker: TalkerRig, reference: Reference
) -> None:
    answers = {
        name: reference.answer(random_prompt(33, seed), thinker_max_new_tokens=20, talker_max_new_tokens=60)
        for seed, name in enumerate(("slow", "slower", "whole"))
    }
    late = []
    for name in ("slow", "slower"):
        first, *rest = rows_of(name, answers[name], answers[name].prompt_positions + 2)
        pair_talker.service.accept(start_of(name, answers[name]))
        pair_talker.service.accept(first)
        late += rest
    while pair_talker.service.ready:
        assert pair_talker.step() == {}
    made = {name: pair_talker.codes(name) for name in ("slow", "slower")}
    assert all(made.values())
    before = len(pair_talker.steps.scheduled)
    pair_talker.take("whole", answers["whole"])
    while pair_talker.service.ready:
        assert pair_talker.step() == {}
    assert pair_talker.finished == ["whole"]
    assert {name: pair_talker.codes(name) for name in ("slow", "slower")} == made
    # One of them was enough, and no step went by without work.
    assert sum(pair_talker.steps.preemptions.values()) == 1
    assert all(pair_talker.steps.scheduled[before:-1])
    for message in late:
        pair_talker.service.accept(message)
    pair_talker.run()
    assert {name: pair_talker.codes(name) for name in answers} == {
        name: answer.codes for name, answer in answers.items()
    }


def test_a_request_that_can_run_keeps_the_places_of_those_that_wait_for_a_row(
    pair_talker: TalkerRig, reference: Reference
) -> None:
    answers = [
        reference.answer(random_prompt(33, seed), thinker_max_new_tokens=20, talker_max_new_tokens=60)
        for seed in range(3)
    ]
    first, rest = rows_of("slow", answers[0], answers[0].prompt_positions + 2)
    pair_talker.service.accept(start_of("slow", answers[0]))
    pair_talker.service.accept(first)
    pair_talker.take("one", answers[1])
    while pair_talker.codes("one") != answers[1].codes[:5]:
        assert pair_talker.step() == {}
    pair_talker.take("two", answers[2])
    for _ in range(3):
        assert pair_talker.step() == {}
    pair_talker.service.accept(rest)
    pair_talker.run()
    assert not pair_talker.steps.preemptions
    assert pair_talker.codes("slow") == answers[0].codes


def test_a_suspect_is_computed_alone_while_it_has_rows(talker: TalkerRig, reference: Reference) -> None:
    answers = {
        name: reference.answer(random_prompt(33, seed), thinker_max_new_tokens=20, talker_max_new_tokens=60)
        for seed, name in enumerate(("innocent", "suspect"))
    }
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
    assert {name: talker.codes(name) for name in answers} == {
        name: answer.codes for name, answer in answers.items()
    }
