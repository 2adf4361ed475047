"""Who is computed when: by listeners' clocks, suspects alone, none that is held; and what is told of it."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from services.thinker.text_sender import READ_TOKENS_PER_S
from shared.messages import Route, TalkerInput, TextDelta, ThinkRequest
from shared.transport.queues import PullQueue
from shared.transport.routing import PeerQueues
from shared.vllm.generating import FIRST_TOKENS
from shared.vllm.scheduling import TRIAL_TOKENS
from tests.shared.support import ANY_PORT, Context, sending, wait_until
from tests.support.answers import random_prompt
from tests.support.conversations import Item, Processor, asks
from tests.support.http import Change
from tests.support.media import picture, spoken
from tests.support.thinking import ThinkerRig, early_request, request_about, speech_of, thinker_request

WINDOW = 8 * 1024
"""Of which a row of the tiny checkpoint takes 512 bytes."""


class Talkers:
    """Two talkers behind real sockets, in the place of the rig's; they read when they are told to."""

    def __init__(self, rig: ThinkerRig, context: Context) -> None:
        self.rig = rig
        self.inboxes = {name: PullQueue[Any](context, ANY_PORT, TalkerInput) for name in ("good", "bad")}
        self.queues = PeerQueues[Any](context, "talker", sending(window_bytes=WINDOW))
        self.queues.reach({name: inbox.endpoint for name, inbox in self.inboxes.items()})
        self.texts: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    def request(self, talker: str, name: str, **options: Any) -> ThinkRequest:
        request = thinker_request(name, random_prompt(30), speech=speech_of(), **{"min_tokens": 30} | options)
        return msgspec.structs.replace(request, route=Route(thinker="a", talker=talker, token2wav="b"))

    def read(self, *names: str) -> None:
        """Let some talkers read, and their credit come back."""
        for name in names:
            list(self.inboxes[name].drain())
            for credit in self.inboxes[name].take_credits():
                self.queues.credit(credit)
        self.queues.flush()

    def come_round(self, *readers: str) -> None:
        """What the stage's loop would do once."""
        self.read(*readers)
        if self.rig.service.ready:
            assert self.rig.service.step() == {}
        for event in self.rig._gateway.take():
            assert isinstance(event, TextDelta)
            self.texts.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                self.ended.add(event.request_id)

    def rest(self, *readers: str) -> None:
        """Come to where the loop would sleep."""
        wait_until(lambda: not self.rig.service.ready, lambda: self.come_round(*readers))

    def hold(self) -> None:
        """Let a request be begun whose talker does not read."""
        self.rig.service.accept(self.request("bad", "held"))
        wait_until(lambda: "held" in self.texts and not self.rig.service.ready, self.come_round)

    def run(self, *readers: str, until: set[str]) -> None:
        wait_until(lambda: self.ended >= until, lambda: self.come_round(*readers))


@pytest.fixture
def context() -> Iterator[Context]:
    context = Context()
    yield context
    context.destroy(linger=0)


def with_talkers(rig: ThinkerRig, context: Context, monkeypatch: pytest.MonkeyPatch) -> Talkers:
    talkers = Talkers(rig, context)
    monkeypatch.setattr(rig.service, "_following", talkers.queues)
    monkeypatch.setattr(rig.service._rows, "_talker", talkers.queues)
    return talkers


def test_requests_of_the_other_talker_go_on_and_those_held_end_as_they_would_have(
    thinker: ThinkerRig, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    talkers = with_talkers(thinker, context, monkeypatch)
    for name, talker in (("held", "bad"), ("one", "good"), ("two", "good")):
        thinker.service.accept(talkers.request(talker, name))
    thinker.service.accept(thinker_request("text", random_prompt(5), min_tokens=20))
    talkers.run("good", until={"one", "two", "text"})
    assert talkers.ended == {"one", "two", "text"}
    # What has no talker that reads it is not made; and the loop would sleep, not turn.
    assert len(talkers.texts.get("held", [])) < 30
    talkers.rest("good")
    assert talkers.queues.outstanding_bytes <= 2 * WINDOW
    thinker.service.accept(talkers.request("bad", "late"))
    assert not thinker.service.ready
    talkers.run("good", "bad", until={"held", "late"})
    assert talkers.texts["held"] == talkers.texts["one"] == talkers.texts["two"] == talkers.texts["late"]
    assert thinker.service.active_requests() == []


def test_a_held_request_gives_its_place_to_one_that_can_run(
    single_thinker: ThinkerRig, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    talkers = with_talkers(single_thinker, context, monkeypatch)
    preemptions = single_thinker.scheduler.preemptions
    talkers.hold()
    made = len(talkers.texts["held"])
    assert 0 < made < 30
    single_thinker.service.accept(talkers.request("good", "one"))
    talkers.run("good", until={"one"})
    assert single_thinker.scheduler.preemptions == preemptions + 1
    assert len(talkers.texts["held"]) == made
    talkers.rest("good")
    talkers.run("good", "bad", until={"held"})
    assert talkers.texts["held"] == talkers.texts["one"]


def test_a_held_request_keeps_its_place_while_there_is_room(
    thinker: ThinkerRig, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    talkers = with_talkers(thinker, context, monkeypatch)
    preemptions = thinker.scheduler.preemptions
    thinker.service.accept(talkers.request("bad", "held"))
    thinker.service.accept(thinker_request("text", random_prompt(5), min_tokens=200))
    wait_until(lambda: talkers.queues.backlog_bytes > 0 and "text" in talkers.texts, talkers.come_round)
    # A step in which nothing is computed, because nothing is left that could be.
    thinker.service.abort("text")
    talkers.rest()
    thinker.service.accept(thinker_request("next", random_prompt(5)))
    talkers.run(until={"next"})
    assert thinker.scheduler.preemptions == preemptions
    talkers.run("bad", until={"held"})


def test_an_abort_frees_the_talker_of_others(
    thinker: ThinkerRig, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    talkers = with_talkers(thinker, context, monkeypatch)
    talkers.hold()
    assert talkers.queues.backlog_bytes > 0
    thinker.service.abort("held")
    talkers.queues.discard("held")
    assert talkers.queues.backlog_bytes == 0
    # The bytes on the way still count; they have no row of another request among them.
    thinker.service.accept(talkers.request("bad", "next"))
    talkers.run("bad", until={"next"})


def test_a_held_request_keeps_its_place_beside_a_prompt_that_is_computed_early(
    single_thinker: ThinkerRig, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    talkers = with_talkers(single_thinker, context, monkeypatch)
    preemptions = single_thinker.scheduler.preemptions
    talkers.hold()
    single_thinker.service.accept(early_request("early", random_prompt(40)))
    # It is taken, and then there is nothing to do until the talker reads.
    talkers.rest("good")
    assert single_thinker.scheduler.preemptions == preemptions
    assert single_thinker.service.holds("early")
    talkers.run("good", "bad", until={"held"})
    wait_until(lambda: not single_thinker.service.holds("early"), single_thinker.step)
    assert single_thinker.prefilled["early"].tokens == 40


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
    thinker.advance(3)
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
    thinker.advance(3)
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
    thinker.accept(*requests.values())
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
    before_it = time.monotonic()
    thinker.step()
    assert thinker.steps.scheduled[-1] == {"due": 1, "text": 1}
    clock = thinker.service._generations["text"].clock
    assert before_it <= clock.due <= time.monotonic() + 1 / READ_TOKENS_PER_S
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
    single_thinker.advance(4)
    single_thinker.service.accept(ask("b", 2, suspect=True))
    while "b" not in single_thinker.finished:
        single_thinker.service.take_turn()
        single_thinker.step()
    assert single_thinker.scheduler.preemptions > preemptions
    while single_thinker.service.active_requests():
        single_thinker.service.take_turn()
        single_thinker.step()


OURS = {"stage": "thinker"}


def test_rows_batches_and_the_prefix_cache_are_told(thinker: ThinkerRig) -> None:
    change = Change(thinker.service.collect)
    prompt = random_prompt(300, seed=77)
    thinker.run(thinker_request("first", prompt, speech=speech_of()), thinker_request("text", [5, 6, 7]))
    assert change("omnirelay_conditioning_rows_sent_total", **OURS) == thinker.rows("first").shape[0]
    assert change("omnirelay_stage_batch_requests_sum", **OURS) == sum(map(len, thinker.steps.scheduled))
    assert change("omnirelay_prefix_cache_queried_tokens_total", **OURS) == 303
    assert change("omnirelay_prefix_cache_hit_tokens_total", **OURS) == 0
    thinker.run(thinker_request("again", prompt, max_tokens=2))
    usage = thinker.usage("again")
    assert usage.cached_tokens > 0
    assert change("omnirelay_prefix_cache_hit_tokens_total", **OURS) == usage.cached_tokens
    assert change("omnirelay_prefix_cache_queried_tokens_total", **OURS) == 603


def test_media_are_told_by_kind_and_outcome(thinker: ThinkerRig, processor: Processor) -> None:
    change = Change(thinker.service.collect)

    def items(kind: str, outcome: str) -> float:
        return change("omnirelay_media_items_total", **OURS, kind=kind, outcome=outcome)

    seen = asks(
        Item("image", picture("png", 771)),
        Item("audio", spoken("wav", "How many of them are there?")),
        "What is this?",
    )
    thinker.run(request_about("first", seen, processor, speech=None, max_tokens=2))
    assert [items(kind, "decoded") for kind in ("image", "audio", "video")] == [1, 1, 0]
    thinker.run(request_about("again", seen, processor, speech=None, max_tokens=2))
    assert [items(kind, "cached") for kind in ("image", "audio", "video")] == [1, 1, 0]
    assert [items(kind, "decoded") for kind in ("image", "audio", "video")] == [1, 1, 0]
    bad = asks(Item("image", b"no picture at all"), "Well?")
    thinker.failure(request_about("bad", bad, processor, speech=None))
    assert items("image", "failed") == 1
    assert items("image", "decoded") == 1
    assert change("omnirelay_media_decode_seconds_count", **OURS, kind="image") == 2
    assert change("omnirelay_media_decode_seconds_sum", **OURS, kind="image") > 0
    assert change("omnirelay_media_prepare_seconds_count", **OURS) == 3
    decoded = change("omnirelay_media_decode_seconds_sum", **OURS, kind="image")
    assert change("omnirelay_media_prepare_seconds_sum", **OURS) > decoded
