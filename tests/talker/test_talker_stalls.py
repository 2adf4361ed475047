"""A token2wav that does not keep up holds its own requests, and nobody else's."""

import pytest

from tests.support.answers import Reference, random_prompt
from tests.support.talking import TalkerRig


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
