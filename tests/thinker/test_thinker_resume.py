"""A resumed request goes on where it stood: text and rows are those of a run that nobody disturbed."""

import itertools
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from omnirelay.errors import InvalidRequestError, PromptTooLongError
from shared.messages import FinishReason, Resume, ResumedSpeech, ThinkRequest
from tests.support.answers import random_prompt
from tests.support.conversations import Item, Processor, asks, examples
from tests.support.media import clip
from tests.support.thinking import ThinkerRig, request_about, speech_of, thinker_request

TOLERANCE = 1e-4
END = 1538
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, with a penalty": {"repetition_penalty": 1.3},
    "top-k and top-p": {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05},
    "temperature alone": {"temperature": 1.2},
    "top-k alone": {"temperature": 0.8, "top_k": 7},
    "top-p alone": {"temperature": 0.8, "top_p": 0.7},
    "presence and frequency": {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.9,
        # Else the tiny model repeats nothing.
        "logit_bias": {7: 50.0, 8: 49.5, 9: 48.0},
    },
    "min-p and biases": {"temperature": 1.0, "min_p": 0.3, "logit_bias": {5: 4.0, 6: -4.0}},
    "a schema": {"temperature": 1.0, "json_schema": '{"type": "array", "items": {"type": "integer"}}'},
    "no end before the 35th": {"temperature": 1.0, "min_tokens": 35},
    "one token": {"max_tokens": 1},
}


def resumed(request: ThinkRequest, name: str, text: list[int], **resume: Any) -> ThinkRequest:
    return msgspec.structs.replace(request, request_id=name, resume=Resume(text_token_ids=text, **resume))


def check_rows(rig: ThinkerRig, name: str, whole: str) -> None:
    assert rig.starts[name].prompt_tokens == rig.starts[whole].prompt_tokens
    assert rig.tracks[name][-1].last
    assert torch.equal(rig.positions(name), rig.positions(whole))
    assert rig.rows(name).shape == rig.rows(whole).shape
    assert float((rig.rows(name) - rig.rows(whole)).abs().max()) < TOLERANCE


def cuts_of(request: ThinkRequest, text: list[int], reason: FinishReason | None) -> list[ThinkRequest]:
    """Attempts from the start, from places in the middle, from before the end, and from behind it."""
    cuts = {0, 1, 2, len(text) // 2, len(text) - 1} & set(range(len(text)))
    attempts = [resumed(request, f"{request.request_id}.{cut}", text[:cut]) for cut in cuts]
    if request.speech:
        attempts.append(resumed(request, f"{request.request_id}.end", text, finish_reason=reason))
    return attempts


def check(rig: ThinkerRig, attempt: ThinkRequest, whole: str) -> None:
    """Whether what came of an attempt is what was missing of the request."""
    assert attempt.resume is not None
    name, there = attempt.request_id, attempt.resume.text_token_ids
    assert there + rig.text(name) == rig.text(whole)
    if attempt.resume.finish_reason is None:
        assert rig.reason(name) == rig.reason(whole)
        usage, first = rig.usage(name), rig.usage(whole)
        assert usage.tokens == first.tokens >= usage.cached_tokens
    else:
        assert rig.texts[name] == []
    if attempt.speech:
        check_rows(rig, name, whole)


def check_attempts(rig: ThinkerRig, *requests: ThinkRequest) -> None:
    """Resume what was answered already wherever it can be."""
    attempts = {
        request.request_id: cuts_of(request, rig.text(request.request_id), rig.reason(request.request_id))
        for request in requests
    }
    rig.run(*itertools.chain(*attempts.values()))
    for whole, each in attempts.items():
        for attempt in each:
            check(rig, attempt, whole)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_it_goes_on_wherever_it_was_cut(thinker: ThinkerRig, sampling: dict[str, Any]) -> None:
    requests = [
        thinker_request(f"{kind}{length}", random_prompt(length), seed=length, speech=speech, **sampling)
        for kind, speech in (("spoken", speech_of()), ("text", None))
        for length in (1, 33, 34)
    ]
    thinker.run(*requests)
    if not sampling:
        assert {thinker.reason(request.request_id) for request in requests} == {"stop", "length"}
    check_attempts(thinker, *requests)


def test_with_media_in_the_prompt(thinker: ThinkerRig, processor: Processor) -> None:
    requests = [
        request_about(f"r{number}", each, processor, max_tokens=20, temperature=0.9)
        for number, each in enumerate(examples().values())
    ]
    thinker.run(*requests)
    check_attempts(thinker, *requests)


def test_positions_go_on_from_the_largest_of_the_prompt(thinker: ThinkerRig, processor: Processor) -> None:
    """A picture is wider than the sound behind it is long: the prompt's last position is not its largest."""
    video = Item("video", clip("mp4", 1.0, 4, 1680, 56, text="Hi."))
    request = request_about("a", asks(video, use_audio_in_video=True), processor, max_tokens=12)
    thinker.run(request)
    positions = thinker.positions("a")[:, : thinker.starts["a"].prompt_tokens]
    assert positions.max() > positions[:, -1].max()
    check_attempts(thinker, request)


def test_in_pieces_and_from_the_cache(chunked_thinker: ThinkerRig) -> None:
    """A step computes 48 tokens at most: the border of prompt and reply lies somewhere in a piece."""
    request = thinker_request(
        "a", random_prompt(130), speech=speech_of(), temperature=1.0, min_tokens=40, seed=3
    )
    chunked_thinker.run(request)
    for attempt in cuts_of(request, chunked_thinker.text("a"), "length"):
        # The cache knows the prompt of these, and not of the others.
        chunked_thinker.run(attempt)
        check(chunked_thinker, attempt, "a")
        chunked_thinker.engine.reset_prefix_cache()
        again = msgspec.structs.replace(attempt, request_id=f"{attempt.request_id}.again")
        chunked_thinker.run(again)
        check(chunked_thinker, again, "a")
        assert max(chunked_thinker.steps.of(again.request_id)) == 48


def test_preempted_before_and_after(tight_thinker: ThinkerRig, thinker: ThinkerRig) -> None:
    """Of fourteen blocks, each of four requests wants five in the end."""
    requests = [
        thinker_request(
            f"r{seed}",
            random_prompt(100, seed),
            speech=speech_of(),
            temperature=1.0,
            min_tokens=40,
            seed=seed,
        )
        for seed in range(4)
    ]
    thinker.run(*requests)
    tight_thinker.run(*requests)
    assert tight_thinker.steps.preemptions.total() > 0
    attempts = {}
    for request in requests:
        whole = request.request_id
        assert tight_thinker.text(whole) == thinker.text(whole)
        attempts[whole] = resumed(request, f"{whole}.7", thinker.text(whole)[:7])
    before = tight_thinker.steps.preemptions.total()
    tight_thinker.run(*attempts.values())
    assert tight_thinker.steps.preemptions.total() > before
    for whole, attempt in attempts.items():
        check(tight_thinker, attempt, whole)


def test_speech_that_ended_wants_no_rows(thinker: ThinkerRig) -> None:
    request = thinker_request("a", random_prompt(34), speech=speech_of())
    thinker.run(request)
    text = thinker.text("a")
    spoken = ResumedSpeech(codec_token_ids=[1, 2], finish_reason="stop", chunk_samples=[480])
    thinker.run(resumed(request, "b", text[:5], speech=spoken))
    assert thinker.text("b") == text[5:]
    assert thinker.starts["b"].resume == spoken
    assert "b" not in thinker.tracks


def test_what_is_complete_is_passed_on_and_costs_nothing(thinker: ThinkerRig) -> None:
    request = thinker_request("a", random_prompt(34), speech=speech_of())
    spoken = ResumedSpeech(codec_token_ids=[1, 2], finish_reason="stop", chunk_samples=[480])
    with mock.patch.object(thinker.engine, "add_request") as add_request:
        thinker.service.accept(resumed(request, "b", [5, END], finish_reason="stop", speech=spoken))
    add_request.assert_not_called()
    assert not thinker.service.ready
    assert not thinker.service.holds("b")
    thinker.collect()
    assert thinker.starts["b"].resume == spoken
    assert "b" not in thinker.texts
    assert "b" not in thinker.tracks


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "no such token": ({"text_token_ids": [5, 1600]}, r"resume.text_token_ids\[1\]: token 1600"),
    "an end in the middle": ({"text_token_ids": [5, END, 6]}, r"resume.text_token_ids\[1\]: token 1538"),
    "an end, but no reason": ({"text_token_ids": [5, END]}, r"resume.text_token_ids\[1\]: token 1538"),
    "all, but no reason": ({"text_token_ids": [5] * 40}, "resume.text_token_ids: all 40 tokens"),
    "too many": ({"text_token_ids": [5] * 41}, "resume.text_token_ids: 41 tokens"),
    "too many, and a reason": (
        {"text_token_ids": [5] * 41, "finish_reason": "length"},
        "resume.text_token_ids: 41 tokens",
    ),
    "stop without an end": (
        {"text_token_ids": [5], "finish_reason": "stop"},
        "resume.text_token_ids: the finish_reason is 'stop'",
    ),
    "stop without tokens": ({"finish_reason": "stop"}, "resume.text_token_ids: the finish_reason is 'stop'"),
    "length without tokens": (
        {"finish_reason": "length"},
        "resume.text_token_ids: the finish_reason is 'len",
    ),
    "one token, but speech": (
        {"text_token_ids": [END], "finish_reason": "stop", "speech": ResumedSpeech(codec_token_ids=[7])},
        "resume.speech.codec_token_ids: a reply of one token",
    ),
}


@pytest.mark.parametrize(("resume", "words"), HOSTILE.values(), ids=HOSTILE)
def test_what_no_attempt_can_have_given_is_refused(
    thinker: ThinkerRig, resume: dict[str, Any], words: str
) -> None:
    kept = thinker_request("kept", random_prompt(20))
    thinker.service.accept(kept)
    request = thinker_request("bad", random_prompt(20), speech=speech_of())
    with pytest.raises(InvalidRequestError, match=words):
        thinker.service.accept(msgspec.structs.replace(request, resume=Resume(**resume)))
    assert thinker.service.active_requests() == ["kept"]
    thinker.run()
    assert len(thinker.text("kept")) > 1


def test_speech_of_an_answer_in_text_only_is_refused(thinker: ThinkerRig) -> None:
    request = thinker_request("bad", random_prompt(20))
    with pytest.raises(InvalidRequestError, match=r"resume.speech: "):
        thinker.service.accept(resumed(request, "bad", [5], speech=ResumedSpeech()))


@pytest.mark.parametrize("ended", [True, False])
def test_more_tokens_than_fit_are_refused(thinker: ThinkerRig, processor: Processor, ended: bool) -> None:
    """Only with its media is a prompt as long as it is."""
    conversation = examples()["image"]
    prompt = processor.prompt(conversation)
    prompt += random_prompt(2290 - len(prompt))
    request = thinker_request("bad", prompt, media=conversation.media, speech=speech_of())
    reason = "length" if ended else None
    error = thinker.failure(resumed(request, "bad", [5] * 13, finish_reason=reason))
    assert isinstance(error, (InvalidRequestError, PromptTooLongError))
