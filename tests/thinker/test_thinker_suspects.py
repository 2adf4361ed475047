"""A request that may end the engine is computed in steps of its own."""

import msgspec

from shared.messages import Route, ThinkRequest
from shared.vllm.scheduling import TRIAL_TOKENS
from tests.support.answers import random_prompt
from tests.support.thinking import ThinkerRig, speech_of, thinker_request

TOKENS = TRIAL_TOKENS + 8


def ask(name: str, seed: int, suspect: bool) -> ThinkRequest:
    request = thinker_request(
        name, random_prompt(30, seed), speech=speech_of(), max_tokens=TOKENS, min_tokens=TOKENS
    )
    route = Route(thinker="a", talker="b", token2wav="c", alone=("thinker",) if suspect else ("talker",))
    return msgspec.structs.replace(request, route=route)


def run(rig: ThinkerRig, suspects: str) -> dict[str, list[int]]:
    """Ask the same every time, and give the answers."""
    for seed, name in enumerate("abcd"):
        rig.service.accept(ask(name, seed, name in suspects))
    while rig.service.active_requests():
        alone = rig.service.take_turn()
        assert rig.step() == {}
        if rig.steps.scheduled and rig.steps.scheduled[-1]:
            assert alone is None or list(rig.steps.scheduled[-1]) == [alone]
    return {name: rig.text(name) for name in "abcd"}


def test_suspects_are_computed_one_at_a_time_and_end_as_they_would_have(thinker: ThinkerRig) -> None:
    together = run(thinker, "")
    thinker.forget()
    assert run(thinker, "bc") == together
    steps = ["".join(step) for step in thinker.steps.scheduled]
    assert steps[: 2 * TRIAL_TOKENS + 2] == ["b"] * (TRIAL_TOKENS + 1) + ["c"] * (TRIAL_TOKENS + 1)
    assert sorted(steps[2 * TRIAL_TOKENS + 2]) == list("abcd")


def test_no_step_has_a_suspect_whose_turn_was_not_taken(thinker: ThinkerRig) -> None:
    """The gateway does not know yet that it is computed alone."""
    thinker.service.accept(ask("a", 1, suspect=False))
    assert thinker.service.take_turn() is None
    thinker.service.accept(ask("b", 2, suspect=True))
    thinker.step()
    assert list(thinker.steps.scheduled[-1]) == ["a"]
    assert thinker.service.take_turn() == "b"
    thinker.service.abort("b")
    thinker.step()
    assert list(thinker.steps.scheduled[-1]) == ["a"]


def test_a_suspect_gets_the_only_place(single_thinker: ThinkerRig) -> None:
    preemptions = single_thinker.scheduler.preemptions
    single_thinker.service.accept(ask("a", 1, suspect=False))
    for _ in range(4):
        single_thinker.step()
    single_thinker.service.accept(ask("b", 2, suspect=True))
    while "b" not in single_thinker.finished:
        single_thinker.service.take_turn()
        single_thinker.step()
    assert single_thinker.scheduler.preemptions > preemptions
    while single_thinker.service.active_requests():
        single_thinker.service.take_turn()
        single_thinker.step()
