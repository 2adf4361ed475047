"""A replica and its gateway: joining, orphans, draining; the loop with real sockets."""

from typing import Any

import pytest

from shared.config import Config
from shared.messages import Closing, Peers, Route, Sampling, SpeechSettings, SynthesisStart
from shared.stage.gateways import GatewayLink
from shared.transport.wire import encode
from tests.shared.stages import INSTANCE, STAGE, Harness, running
from tests.shared.support import Context, wait_until


def tell(harness: Harness, message: Peers | Closing) -> None:
    """Speak for the gateway."""
    harness.router.send_multipart([STAGE.encode(), *encode(message)])


def joined(harness: Harness, gateway: str | None) -> None:
    wait_until(lambda: harness.next_heartbeat().gateway == gateway)


def in_work(harness: Harness, *names: str) -> None:
    for name in names:
        harness.service.work.setdefault(name, [])
        harness.send(name, 0)
    harness.take(len(names))
    assert set(names) <= set(harness.service.work)


def start(name: str, replica: str) -> SynthesisStart:
    speech = SpeechSettings(speaker="Chelsie", sampling=Sampling(max_tokens=1), seed=0)
    route = Route(thinker="a", talker="b", token2wav=replica)
    return SynthesisStart(request_id=name, priority=0, speech=speech, route=route)


def test_what_was_for_another_process_at_the_address_is_dropped(context: Context) -> None:
    with running(context) as harness:
        tell(harness, Peers(gateway="aaaa"))
        joined(harness, "aaaa")
        harness.sender.put(start("aaaa1", "before"))
        harness.send("aaaa1", 0)
        harness.sender.put(start("aaaa2", INSTANCE))
        harness.send("aaaa2", 0)
        (event,) = harness.take(1)
        assert event.request_id == "aaaa2"
        assert harness.inbox.refused.total() == 0


@pytest.mark.parametrize("released", [True, False])
def test_a_stage_that_drains_goes_on_until_nothing_needs_it_or_its_time_is_over(
    context: Context, released: bool
) -> None:
    harness = Harness(context, drain_s=60.0 if released else 0.5)
    harness.listen()
    harness.start()
    tell(harness, Peers(gateway="aaaa"))
    joined(harness, "aaaa")
    in_work(harness, "aaaa1")
    harness.loop.drain()
    wait_until(lambda: harness.next_heartbeat().draining)
    in_work(harness, "aaaa2")
    assert harness.thread.is_alive()
    if released:
        tell(harness, Peers(gateway="aaaa", released=True))
    harness.thread.join(timeout=20)
    assert not harness.thread.is_alive()
    assert harness.error is None
    harness.stop()


def test_a_stage_without_a_gateway_stops_at_once(context: Context) -> None:
    harness = Harness(context, drain_s=60.0)
    harness.start()
    harness.loop.drain()
    harness.thread.join(timeout=20)
    assert not harness.thread.is_alive()
    harness.stop()


def test_a_gateway_that_asked_for_few_heartbeats_may_be_silent_for_longer(context: Context) -> None:
    now = 0.0
    harness = Harness(context)
    link = GatewayLink(harness._control, harness.heart, harness.gateway, 5.0, clock=lambda: now)
    link.hear(Peers(gateway="aaaa"))
    now = 5.1
    assert link.abandoned
    link.hear(Peers(gateway="aaaa", heartbeat_s=4.0))
    now += 11.9
    assert not link.abandoned
    now += 0.2
    assert link.abandoned


def test_a_message_without_a_route_is_for_whoever_gets_it(context: Context) -> None:
    member = Harness(context).membership
    assert member.concerns("any", None)
    member.hear(member.gateways[0], Peers(gateway="aaaa"))
    assert member.concerns("aaaa1", None)
    assert not member.concerns("bbbb1", None)
    assert not member.concerns("aaaa1", Route(thinker="x", token2wav="two"))
    assert member.concerns("aaaa1", Route(thinker="x", token2wav=INSTANCE))


def config(**talker: Any) -> Config:
    return Config.model_validate({"stages": {"talker": talker}, "security": {"internal_network": True}})


def test_an_address_to_tell_is_one_that_can_be_reached() -> None:
    assert config(advertise="tcp://far:1").stages.talker.advertise == "tcp://far:1"
    for wrong in ("tcp://0.0.0.0:1", "tcp://*:1", "tcp://far:*", "far:1"):
        with pytest.raises(ValueError, match="advertise"):
            config(advertise=wrong)


def test_an_inbox_may_be_on_any_free_port() -> None:
    assert config(inbox="tcp://127.0.0.1:*").stages.talker.inbox == "tcp://127.0.0.1:*"
    for wrong in ("tcp://:*", "tcp://h:**", "http://h:*", "tcp://h:"):
        with pytest.raises(ValueError, match="inbox"):
            config(inbox=wrong)
