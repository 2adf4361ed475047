"""The thinker's text equals transformers', and sampling is repeatable."""

from typing import Any

import pytest

from tests.support.answers import Reference, random_prompt
from tests.support.thinking import ThinkerRig, speech_of, thinker_request

LENGTHS = (1, 7, 130, 2000)
MIXED = (1, 7, 130, 2000, 33, 64, 300, 2)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_greedy_reply_is_transformers_reply(thinker: ThinkerRig, reference: Reference, length: int) -> None:
    prompt = random_prompt(length)
    expected = reference.text(prompt, max_tokens=40)
    thinker.run(thinker_request("alone", prompt))
    assert thinker.text("alone") == expected
    assert len(expected) > 2


def test_eight_at_once_each_get_their_own_reply(thinker: ThinkerRig, reference: Reference) -> None:
    prompts = {f"r{length}": random_prompt(length) for length in MIXED}
    thinker.run(
        *(
            thinker_request(name, prompt, speech=speech_of() if index % 2 else None)
            for index, (name, prompt) in enumerate(prompts.items())
        )
    )
    assert max(len(step) for step in thinker.steps.scheduled) == 8
    expected = {name: reference.text(prompt, max_tokens=40) for name, prompt in prompts.items()}
    assert {name: thinker.text(name) for name in prompts} == expected
    assert len({tuple(reply) for reply in expected.values()}) == 8


def test_a_checkpoint_of_other_sizes(other_thinker: ThinkerRig, other_reference: Reference) -> None:
    prompts = {"short": random_prompt(9), "long": random_prompt(350)}
    other_thinker.run(*(thinker_request(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert other_thinker.text(name) == other_reference.text(prompt, max_tokens=40)


def test_an_end_token_stops_and_is_delivered(thinker: ThinkerRig, reference: Reference) -> None:
    end = reference.model.config.thinker_config.eos_token_id
    prompt = random_prompt(7)
    thinker.run(thinker_request("stops", prompt), thinker_request("cut", prompt, max_tokens=5))
    assert thinker.reason("stops") == "stop"
    assert thinker.text("stops")[-1] == end
    assert end not in thinker.text("stops")[:-1]
    assert len(thinker.text("stops")) < 40
    assert thinker.reason("cut") == "length"
    assert thinker.text("cut") == thinker.text("stops")[:5]
    assert all(delta.finish_reason is None for delta in thinker.texts["stops"][:-1])


def test_tokens_leave_one_by_one(thinker: ThinkerRig) -> None:
    thinker.service.accept(thinker_request("one", random_prompt(7), max_tokens=6))
    for count in range(1, 7):
        assert thinker.step() == {}
        assert len(thinker.text("one")) == count
        assert len(thinker.texts["one"]) == count
    assert thinker.finished == ["one"]


def test_no_end_before_min_tokens(thinker: ThinkerRig, reference: Reference) -> None:
    end = reference.model.config.thinker_config.eos_token_id
    prompt = random_prompt(130)
    thinker.run(thinker_request("early", prompt), thinker_request("late", prompt, min_tokens=20))
    assert len(thinker.text("early")) < 20 <= len(thinker.text("late"))
    assert end not in thinker.text("late")[:19]


def test_max_tokens_is_cut_to_the_room_behind_the_prompt(thinker: ThinkerRig) -> None:
    limit = thinker.service.limits.max_positions
    prompt = random_prompt(limit - 3)
    thinker.run(thinker_request("tail", prompt, max_tokens=40, min_tokens=40))
    assert len(thinker.text("tail")) == 3
    assert thinker.reason("tail") == "length"


def test_a_seed_makes_sampling_repeatable(thinker: ThinkerRig) -> None:
    prompt = random_prompt(7)
    drawn: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 40,
        "top_p": 0.9,
        "min_tokens": 30,
        "max_tokens": 30,
    }
    thinker.run(thinker_request("alone", prompt, seed=5, **drawn))
    thinker.run(
        thinker_request("again", prompt, seed=5, **drawn),
        thinker_request("other", prompt, seed=6, **drawn),
        thinker_request("greedy", prompt, min_tokens=30, max_tokens=30),
        thinker_request("different", random_prompt(33), seed=5, **drawn),
    )
    assert thinker.text("again") == thinker.text("alone")
    assert len({tuple(thinker.text(name)) for name in ("alone", "other", "greedy", "different")}) == 4


def test_a_seed_holds_for_a_prompt_computed_in_pieces(
    thinker: ThinkerRig, chunked_thinker: ThinkerRig
) -> None:
    prompts = {"long": random_prompt(300, seed=8), "longer": random_prompt(400, seed=9)}
    drawn: dict[str, Any] = {"seed": 5, "temperature": 1.0, "top_k": 40, "min_tokens": 30, "max_tokens": 30}
    for name, prompt in prompts.items():
        thinker.run(thinker_request(name, prompt, **drawn))
    chunked_thinker.run(*(thinker_request(name, prompt, **drawn) for name, prompt in prompts.items()))
    for name in prompts:
        assert len([count for count in chunked_thinker.steps.of(name) if count > 1]) > 5
        assert chunked_thinker.text(name) == thinker.text(name)


def test_priority_decides_who_is_served_first(single_thinker: ThinkerRig, reference: Reference) -> None:
    order = {"last": 9, "middle": 5, "equal": 5, "first": -3}
    prompts = {name: random_prompt(20, seed=index) for index, name in enumerate(order)}
    single_thinker.run(
        *(thinker_request(name, prompts[name], priority=priority) for name, priority in order.items())
    )
    assert single_thinker.finished == ["first", "middle", "equal", "last"]
    assert max(len(step) for step in single_thinker.steps.scheduled) == 1
    for name, prompt in prompts.items():
        assert single_thinker.text(name) == reference.text(prompt, max_tokens=40)


def test_the_stage_says_what_it_holds(single_thinker: ThinkerRig) -> None:
    service = single_thinker.service
    for name in ("a", "b"):
        service.accept(thinker_request(name, random_prompt(20)))
    single_thinker.step()
    load = service.load()
    assert (load.running, load.waiting) == (1, 1)
    single_thinker.step()
    assert service.load().steps == load.steps + 1
    assert service.holds("a")
    assert not service.holds("c")
    assert service.active_requests() == ["a", "b"]
    assert service.limits.speakers == ["Chelsie", "Ethan"]
