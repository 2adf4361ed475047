"""Hosts that are apart: cut off and back, cut one way, forgotten by a firewall, slow, losing packets."""

import time
from contextlib import ExitStack

import pytest

from shared.messages import STAGES
from tests.apart.crowd import Crowd
from tests.apart.stack import NAMES, ApartStack
from tests.chaos.streams import Heard
from tests.support.processes import wait_until

pytestmark = [pytest.mark.apart, pytest.mark.timeout(300)]

CUT_S = 10.0
NOTICED_S = 5.0
"""A host from which nothing comes is known to be lost after 1.5 s, and the ticks of all who take part."""
GIVEN_UP_S = 25.0
"""A connection on which nothing is acknowledged is given up after 10 s, and what the kernel adds."""
BACK_S = 30.0
FREED_S = 10.0


def last(began: float, seconds: float) -> None:
    """Let something last so long, from when it began in monotonic seconds."""
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def come_back(stack: ApartStack, undisturbed: list[Heard], *names: str) -> None:
    """Wait until all processes take requests again and hold nothing old, and see that they are used."""
    seconds = wait_until(stack.all_ready, "all replicas are ready again", BACK_S)
    print(f"\n[apart] all are ready {seconds:.1f} s after the end of it")
    wait_until(lambda: all(stack.held(name) == 0 for name in NAMES[1:]), "nothing old is held", FREED_S)
    with Crowd(stack, undisturbed) as crowd:
        wait_until(lambda: all(stack.held(name) for name in names), "those that were lost are used", BACK_S)
        crowd.check(resumed=False)


def test_hosts_apart_answer_as_one_host_does(stack: ApartStack, undisturbed: list[Heard]) -> None:
    with Crowd(stack, undisturbed) as crowd:
        crowd.check(resumed=False)


def test_a_host_is_cut_off_and_another_takes_its_place(stack: ApartStack, undisturbed: list[Heard]) -> None:
    with Crowd(stack, undisturbed) as crowd:
        crowd.await_streams()
        with stack.hosts["talker"].cut_off():
            began = time.monotonic()
            wait_until(lambda: stack.state("talker") == "down", "the loss is noticed", NOTICED_S)
            crowd.check(resumed=True)
            last(began, CUT_S)
    come_back(stack, undisturbed, "talker", "talker 2")


def test_the_only_host_of_a_stage_is_cut_off_and_its_requests_wait(
    stack: ApartStack, undisturbed: list[Heard]
) -> None:
    with Crowd(stack, undisturbed) as crowd:
        crowd.await_streams()
        with stack.hosts["token2wav"].cut_off():
            began = time.monotonic()
            wait_until(lambda: stack.state("token2wav") == "down", "the loss is noticed", NOTICED_S)
            wait_until(lambda: stack.held("token2wav") == 0, "orphans are freed", FREED_S)
            last(began, CUT_S)
        crowd.check(resumed=True)
    come_back(stack, undisturbed, "token2wav")


def test_the_gateways_host_is_cut_off_and_its_orphans_are_freed(
    stack: ApartStack, undisturbed: list[Heard]
) -> None:
    with Crowd(stack, undisturbed) as crowd:
        crowd.await_streams()
        with stack.hosts["gateway"].cut_off():
            began = time.monotonic()
            for name in NAMES[1:]:
                wait_until(lambda name=name: stack.held(name) == 0, "orphans are freed", FREED_S)  # type: ignore[misc]
            last(began, CUT_S)
        crowd.check(resumed=True)
    come_back(stack, undisturbed, *STAGES)


def test_packets_between_two_stages_are_lost_in_one_direction(
    stack: ApartStack, undisturbed: list[Heard]
) -> None:
    """The gateway hears both of them: only who sends can know."""
    with stack.hosts["talker"].deaf_to(stack.hosts["thinker"]):
        with Crowd(stack, undisturbed) as crowd:
            crowd.check()
            assert ("talker", "cut off") in crowd.resumed()
        wait_until(lambda: stack.state("talker") != "ready", "it is given nothing more", GIVEN_UP_S)
        with Crowd(stack, undisturbed) as crowd:
            crowd.check(resumed=False)
    come_back(stack, undisturbed, "talker", "talker 2")


@pytest.mark.parametrize(("deaf", "other"), [("gateway", "token2wav"), ("token2wav", "gateway")])
def test_packets_between_a_stage_and_the_gateway_are_lost_in_one_direction(
    stack: ApartStack, undisturbed: list[Heard], deaf: str, other: str
) -> None:
    with Crowd(stack, undisturbed) as crowd:
        crowd.await_streams()
        with stack.hosts[deaf].deaf_to(stack.hosts[other]):
            seconds = wait_until(lambda: stack.state("token2wav") != "ready", "it is noticed", GIVEN_UP_S)
            print(f"\n[apart] noticed after {seconds:.1f} s")
        crowd.check(resumed=True)
    come_back(stack, undisturbed, "token2wav")


@pytest.mark.parametrize(
    ("server", "client", "port"),
    [("thinker", "gateway", 5562), ("talker", "thinker", 5563), ("gateway", "token2wav", 5560)],
)
def test_a_firewall_forgets_a_connection(
    stack: ApartStack, undisturbed: list[Heard], server: str, client: str, port: int
) -> None:
    """Who sends is told, what was under way is gone, and who receives hears of nothing.

    What is lost is the first message of a request; to the gateway it is one in the middle, or the last.
    """
    sender = "thinker" if client == "gateway" else client
    lost = client if server == "gateway" else server
    with ExitStack() as clients:
        with stack.hosts[server].resetting(stack.hosts[client], port):
            crowd = clients.enter_context(Crowd(stack, undisturbed))
            wait_until(lambda: (lost, "cut off") in crowd.resumed(), "requests are begun anew", GIVEN_UP_S)
        crowd.check()
    come_back(stack, undisturbed, sender)


@pytest.mark.parametrize(("megabits", "losing"), [(20.0, 0.0), (0.0, 0.05), (20.0, 0.05)])
def test_a_network_that_is_slow_or_loses_packets_changes_no_answer(
    stack: ApartStack, undisturbed: list[Heard], megabits: float, losing: float
) -> None:
    with ExitStack() as network:
        for host in stack.hosts.values():
            if megabits:
                network.enter_context(host.slow(megabits))
            if losing:
                network.enter_context(host.losing(losing))
        print(f"\n[apart] {megabits:g} Mbit/s, {losing:.0%} of the packets lost:")
        with Crowd(stack, undisturbed) as crowd:
            crowd.check(resumed=False)
    assert stack.all_ready()
