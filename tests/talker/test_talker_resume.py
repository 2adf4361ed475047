"""Resumed speech goes on where it stood: codec tokens are those of a run that nobody disturbed."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnirelay.errors import InvalidRequestError
from shared.messages import FinishReason, ResumedSpeech
from tests.support.answers import CODEC_ENDS, Answer, Reference
from tests.support.talking import TalkerRig, ask, rows_of, start_of
from tests.support.thinking import speech_of

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-k and top-p": {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "max_tokens": 40},
    "temperature alone": {"temperature": 1.0, "max_tokens": 31},
    "top-k alone": {"temperature": 0.8, "top_k": 7, "repetition_penalty": 1.3},
    "top-p alone": {"temperature": 0.8, "top_p": 0.7},
    "no end before the 55th": {"temperature": 1.0, "min_tokens": 55},
}


def attempt(
    rig: TalkerRig, name: str, answer: Answer, there: ResumedSpeech, *cuts: int, **speech: Any
) -> None:
    """Announce speech that is there in part, and give all rows."""
    rig.resume(start_of(name, answer, speech_of(**speech), resume=there))
    rig.accept(*rows_of(name, answer, *cuts))


def check(rig: TalkerRig, name: str, whole: str) -> None:
    there = rig.resumed.get(name, [])
    assert there + rig.codes(name) == rig.codes(whole)
    assert rig.reason(name) == rig.reason(whole)
    sent = [token for message in rig.sent[name] for token in message.token_ids]
    assert sent == rig.codes(whole)
    assert [message.last for message in rig.sent[name]] == [False] * (len(rig.sent[name]) - 1) + [True]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_it_goes_on_wherever_it_was_cut(
    talker: TalkerRig, reference: Reference, sampling: dict[str, Any]
) -> None:
    # The last one's reply is long for what is said of it: an end token comes first.
    answers = {length: ask(reference, length) for length in (1, 40, 2000)}
    for length, answer in answers.items():
        talker.take(f"r{length}", answer, seed=length, **sampling)
    talker.run()
    cut_at: dict[str, tuple[str, int]] = {}
    for length, answer in answers.items():
        codes = talker.codes(f"r{length}")
        # Where an end token was drawn, all codes may be there, and only the end is missing.
        most = len(codes) - (talker.reason(f"r{length}") == "length")
        for cut in {0, 1, 12, 13, 24, len(codes) // 2, len(codes) - 1, most} & set(range(most + 1)):
            cut_at[f"r{length}.{cut}"] = f"r{length}", cut
            there = ResumedSpeech(codec_token_ids=codes[:cut], chunk_samples=[11_520] * (cut // 24))
            attempt(talker, f"r{length}.{cut}", answer, there, seed=length, **sampling)
    talker.run()
    for name, (whole, cut) in cut_at.items():
        check(talker, name, whole)
        assert talker.starts[name].chunk_samples == [11_520] * (cut // 24)
    if not sampling:
        assert (talker.reason("r40"), talker.reason("r2000")) == ("length", "stop")


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    cut=st.integers(1, 39),
    # Places in the track at which a message ends, each with the steps that follow.
    arrivals=st.dictionaries(st.integers(1, 42), st.integers(0, 2), max_size=8),
)
def test_whenever_the_rows_arrive(
    plain_talker: TalkerRig, reference: Reference, cut: int, arrivals: dict[int, int]
) -> None:
    plain_talker.forget()
    answer, sampling = ask(reference, 33), SAMPLINGS["top-k and top-p"]
    assert answer.rows.shape[0] > 42
    plain_talker.take("a", answer, **sampling)
    plain_talker.run()
    codes = plain_talker.codes("a")
    there = ResumedSpeech(codec_token_ids=codes[:cut])
    plain_talker.resume(start_of("b", answer, speech_of(**sampling), resume=there))
    plain_talker.collect()
    # Before any row is there: token2wav need not wait for the thinker.
    assert [message.token_ids for message in plain_talker.sent["b"]] == [codes[:cut]]
    cuts = sorted(arrivals)
    for border, message in zip([*cuts, 0], rows_of("b", answer, *cuts), strict=True):
        plain_talker.service.accept(message)
        for _ in range(arrivals.get(border, 0)):
            assert plain_talker.step() == {}
    plain_talker.run()
    check(plain_talker, "b", "a")


def test_in_pieces_and_preempted(talker: TalkerRig, tight_talker: TalkerRig, reference: Reference) -> None:
    drawn: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_tokens": 60}
    answers = {f"r{seed}": ask(reference, 100, seed) for seed in range(4)}
    for seed, (whole, answer) in enumerate(answers.items()):
        for rig in (talker, tight_talker):
            rig.take(whole, answer, seed=seed, **drawn)
    talker.run()
    tight_talker.run()
    before = tight_talker.steps.preemptions.total()
    assert before > 0
    for seed, (whole, answer) in enumerate(answers.items()):
        assert tight_talker.codes(whole) == talker.codes(whole)
        there = ResumedSpeech(codec_token_ids=talker.codes(whole)[:15])
        attempt(tight_talker, f"{whole}.15", answer, there, seed=seed, **drawn)
    tight_talker.run()
    assert tight_talker.steps.preemptions.total() > before
    for whole in answers:
        check(tight_talker, f"{whole}.15", whole)


def test_other_sizes(other_talker: TalkerRig, other_reference: Reference) -> None:
    answer = ask(other_reference, 120)
    other_talker.take("a", answer)
    other_talker.run()
    attempt(other_talker, "b", answer, ResumedSpeech(codec_token_ids=other_talker.codes("a")[:7]))
    other_talker.run()
    check(other_talker, "b", "a")


@pytest.mark.parametrize(("codes", "reason"), [([5] * 60, "length"), ([5] * 7, "stop"), ([], "stop")])
def test_what_was_spoken_to_its_end_is_passed_on_at_once(
    talker: TalkerRig, reference: Reference, codes: list[int], reason: FinishReason
) -> None:
    there = ResumedSpeech(codec_token_ids=codes, finish_reason=reason, chunk_samples=[960])
    talker.resume(start_of("a", ask(reference, 7), resume=there))
    assert not talker.service.ready
    talker.collect()
    assert [(message.token_ids, message.last) for message in talker.sent["a"]] == [(codes, True)]
    assert talker.starts["a"].chunk_samples == [960]
    assert talker.deltas["a"] == []
    talker.check_empty()


def test_an_abort_of_resumed_speech_leaves_nothing(talker: TalkerRig, reference: Reference) -> None:
    answer = ask(reference, 33)
    there = ResumedSpeech(codec_token_ids=answer.codes[:9])
    talker.resume(start_of("early", answer, resume=there))
    attempt(talker, "late", answer, there)
    talker.advance(3)
    for name in ("early", "late"):
        talker.service.abort(name)
    talker.settle()
    talker.check_empty()


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "what is not drawn": ({"codec_token_ids": [5, 8194]}, r"codec_token_ids\[1\]: token 8194 lies outside"),
    "an end token": ({"codec_token_ids": [5, CODEC_ENDS[1]]}, r"codec_token_ids\[1\]: token 8294 would"),
    "all, but no reason": ({"codec_token_ids": [5] * 60}, "codec_token_ids: all 60 tokens"),
    "too many": ({"codec_token_ids": [5] * 61}, "codec_token_ids: 61 tokens"),
    "too many and an end": (
        {"codec_token_ids": [5] * 60, "finish_reason": "stop"},
        "codec_token_ids: 61 tokens",
    ),
    "length without tokens": ({"finish_reason": "length"}, "codec_token_ids: the finish_reason is 'length'"),
}


@pytest.mark.parametrize(("resume", "words"), HOSTILE.values(), ids=HOSTILE)
def test_what_no_attempt_can_have_given_is_refused(
    talker: TalkerRig, reference: Reference, resume: dict[str, Any], words: str
) -> None:
    answer = ask(reference, 33)
    talker.take("kept", answer)
    talker.step()
    with pytest.raises(InvalidRequestError, match=f"^resume.{words}"):
        talker.service.accept(start_of("bad", answer, resume=ResumedSpeech(**resume)))
    assert talker.service.active_requests() == ["kept"]
    talker.run()
    assert talker.codes("kept") == answer.codes
    assert "bad" not in talker.starts
