"""A talker that does not keep up holds its own requests, and nobody else's."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from shared.messages import Route, TalkerInput, TextDelta, ThinkRequest
from shared.transport.queues import PullQueue
from shared.transport.routing import PeerQueues
from tests.shared.support import ANY_PORT, Context, sending, wait_until
from tests.support.answers import random_prompt
from tests.support.thinking import ThinkerRig, early_request, speech_of, thinker_request

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

    def run(self, *readers: str, until: set[str]) -> None:
        wait_until(lambda: self.ended >= until, lambda: self.come_round(*readers))


@pytest.fixture
def context() -> Iterator[Context]:
    context = Context()
    yield context
    context.destroy(linger=0)


def with_talkers(rig: ThinkerRig, context: Context, monkeypatch: pytest.MonkeyPatch) -> Talkers:
    talkers = Talkers(rig, context)
    for owner in (rig.service, rig.service._rows):
        monkeypatch.setattr(owner, "_talker", talkers.queues)
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
    single_thinker.service.accept(talkers.request("bad", "held"))
    wait_until(lambda: "held" in talkers.texts and not single_thinker.service.ready, talkers.come_round)
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
    thinker.service.accept(talkers.request("bad", "held"))
    wait_until(lambda: "held" in talkers.texts and not thinker.service.ready, talkers.come_round)
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
    single_thinker.service.accept(talkers.request("bad", "held"))
    wait_until(lambda: "held" in talkers.texts and not single_thinker.service.ready, talkers.come_round)
    single_thinker.service.accept(early_request("early", random_prompt(40)))
    # It is taken, and then there is nothing to do until the talker reads.
    talkers.rest("good")
    assert single_thinker.scheduler.preemptions == preemptions
    assert single_thinker.service.holds("early")
    talkers.run("good", "bad", until={"held"})
    wait_until(lambda: not single_thinker.service.holds("early"), single_thinker.step)
    assert single_thinker.prefilled["early"].tokens == 40
