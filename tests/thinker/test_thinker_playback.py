"""Replies that are spoken come before those with time to spare, and are not stopped by a long prompt."""

import time

from services.thinker.text_sender import READ_TOKENS_PER_S
from shared.vllm.pieces import FIRST_TOKENS
from tests.support.answers import random_prompt
from tests.support.thinking import ThinkerRig, speech_of, thinker_request

LONG = 1500


def due(rig: ThinkerRig, request_id: str, in_s: float) -> None:
    """Set a request's clock."""
    rig.service._generations[request_id].clock.due = time.monotonic() + in_s


def test_a_long_prompt_stops_no_reply_that_is_spoken(thinker: ThinkerRig) -> None:
    thinker.run(thinker_request("alone", random_prompt(LONG, seed=7), seed=3))
    assert thinker.steps.of("alone")[0] == LONG
    expected = thinker.text("alone")
    thinker.engine.reset_prefix_cache()

    spoken = thinker_request("spoken", random_prompt(9), speech=speech_of(), min_tokens=400, max_tokens=400)
    thinker.service.accept(spoken)
    for _ in range(3):
        thinker.step()
    first = len(thinker.steps.scheduled)
    thinker.service.accept(thinker_request("long", random_prompt(LONG, seed=7), seed=3))
    while not thinker.texts["long"]:
        # However slow the machine, its listener has something to hear.
        due(thinker, "spoken", 0.5)
        thinker.step()
    pieces = thinker.steps.of("long")
    assert sum(pieces) == LONG
    assert pieces[0] == FIRST_TOKENS
    assert len(pieces) > 2
    # A row in each step.
    assert all(step["spoken"] == 1 for step in thinker.steps.scheduled[first:])
    thinker.run()
    assert thinker.text("long") == expected
    assert len(thinker.text("spoken")) == 400


def test_a_prompt_is_computed_at_once_while_no_spoken_reply_is_due(thinker: ThinkerRig) -> None:
    thinker.service.accept(thinker_request("text", random_prompt(9), min_tokens=100, max_tokens=100))
    for _ in range(3):
        thinker.step()
    thinker.service.accept(thinker_request("long", random_prompt(LONG, seed=8)))
    thinker.step()
    assert thinker.steps.of("long") == [LONG]
    thinker.run()


def test_replies_with_time_to_spare_wait_for_a_spoken_one_that_is_due(thinker: ThinkerRig) -> None:
    requests = {
        "ahead": thinker_request("ahead", random_prompt(9), speech=speech_of(), min_tokens=40),
        "text": thinker_request("text", random_prompt(12), min_tokens=40),
        "due": thinker_request("due", random_prompt(14), speech=speech_of(), min_tokens=40),
    }
    for request in requests.values():
        thinker.service.accept(request)
    thinker.step()
    for name in ("ahead", "text"):
        due(thinker, name, 100)
    before = len(thinker.steps.scheduled)
    for _ in range(5):
        due(thinker, "due", 0)
        thinker.step()
    assert thinker.steps.scheduled[before:] == [{"due": 1}] * 5
    # One that is not spoken is never further behind than a reader.
    due(thinker, "text", 0)
    thinker.step()
    assert thinker.steps.scheduled[-1] == {"due": 1, "text": 1}
    clock, moment = thinker.service._generations["text"].clock, time.monotonic()
    assert moment <= clock.due <= moment + 1 / READ_TOKENS_PER_S
    thinker.run()
    together = {name: thinker.text(name) for name in requests}
    thinker.forget()
    for request in requests.values():
        thinker.run(request)
    assert {name: thinker.text(name) for name in requests} == together


def test_replies_that_are_not_spoken_do_not_wait_for_each_other(thinker: ThinkerRig) -> None:
    for name, length in (("ahead", 9), ("new", 12)):
        thinker.service.accept(thinker_request(name, random_prompt(length), min_tokens=20))
    thinker.step()
    due(thinker, "ahead", 100)
    thinker.step()
    assert thinker.steps.scheduled[-1] == {"ahead": 1, "new": 1}
    thinker.run()
