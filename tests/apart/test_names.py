"""Gateways behind one name, as behind a headless Service: they come and go, with new addresses."""

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from omnirelay import Client
from shared.messages import STAGES
from tests.chaos.streams import Stream, check_heard, heard_of, speaks
from tests.support.ports import free_ports
from tests.support.processes import Processes, wait_until
from tests.support.stack import free_addresses, make_config

pytestmark = [pytest.mark.apart, pytest.mark.timeout(600)]

NAME: Final = "omnirelay-gateways.example"
HOSTS: Final = {f"gateway {number}": f"127.0.0.{number}" for number in (2, 3, 4)}
"""Each gateway's address; all have the same ports there."""
STREAMS: Final = 8
ANSWERS_S: Final = 240.0


class Named(Processes):
    """A stack whose stages know the gateways by a name, which stands in a hosts file of theirs."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._ports = free_ports(2)
        self._clients: dict[str, dict[str, str]] = {}
        for gateway in HOSTS:
            keys = ("listen", "http", "monitor")
            self._clients[gateway] = dict(zip(keys, free_addresses(len(keys)), strict=True))
        config = make_config(
            model, gateway={**self._met(NAME), "drain_s": 60.0}, security={"internal_network": True}
        )
        super().__init__(config, directory)
        self._names = directory / "hosts"
        self.name()

    def _met(self, host: str) -> dict[str, str]:
        return {
            key: f"tcp://{host}:{port}" for key, port in zip(("events", "control"), self._ports, strict=True)
        }

    def name(self, *gateways: str) -> None:
        """Let the name stand for these gateways' addresses."""
        lines = ["127.0.0.1 localhost", *(f"{HOSTS[gateway]} {NAME}" for gateway in gateways)]
        self._names.write_text("\n".join([*lines, ""]), encoding="utf-8")

    def prefix(self, name: str) -> list[str]:
        if name not in STAGES:
            return []
        within = f"mount --bind '{self._names}' /etc/hosts && exec \"$@\""
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", within, "sh"]

    def addresses(self, name: str) -> dict[str, str]:
        if name in HOSTS:
            return {**self._clients[name], **self._met(HOSTS[name])}
        return super().addresses(name)

    def whole(self, gateway: str) -> bool:
        """A gateway has every stage."""
        return self.ready(gateway=gateway)


@pytest.fixture(scope="module")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Named]:
    with Named(tiny_checkpoint, tmp_path_factory.mktemp("named")) as running:
        for name in ("gateway 2", *STAGES):
            running.start(name)
        # The name is unknown at first, as before the first pod.
        wait_until(lambda: all("cannot resolve" in running.log(stage) for stage in STAGES), "they look")
        running.name("gateway 2")
        wait_until(lambda: running.whole("gateway 2"), "it has all stages")
        yield running


def test_gateways_replace_each_other_behind_their_name(stack: Named) -> None:
    one, two, three = HOSTS
    listens = {gateway: stack.addresses(gateway)["listen"] for gateway in HOSTS}
    pids = {stage: stack.running[stage].pid for stage in STAGES}
    with Client(listens[one]) as client:
        undisturbed = heard_of([Stream(client, number) for number in range(STREAMS)])
    stack.start(two)
    stack.name(one, two)
    wait_until(lambda: stack.whole(two), "the second has all stages")
    for leaving, staying, coming in ((one, two, three), (two, three, one)):
        with (
            Client([listens[leaving], listens[staying]]) as moving,
            Client([listens[staying], listens[leaving]]) as other,
        ):
            streams = [Stream((moving, other)[number % 2], number) for number in range(STREAMS)]
            wait_until(partial(speaks, streams[::2]), "speech comes", ANSWERS_S)
            wait_until(partial(speaks, streams[1::2]), "speech comes", ANSWERS_S)
            # As a rolling update does: one more comes, at an address of its own; then an old one goes.
            stack.start(coming)
            stack.name(leaving, staying, coming)
            wait_until(partial(stack.whole, coming), "the new one has all stages")
            # No name for it any more, but what it has goes on.
            stack.name(staying, coming)
            stack.signal(leaving, signal.SIGTERM)
            check_heard(streams, undisturbed)
        assert stack.running.pop(leaving).wait(90) == 0
        for gateway in (staying, coming):
            with Client(listens[gateway]) as client:
                check_heard([Stream(client, number) for number in range(STREAMS)], undisturbed)
    assert {stage: stack.running[stage].pid for stage in STAGES} == pids
    assert all(stack.running[stage].poll() is None for stage in STAGES)


def test_a_lost_gateway_disturbs_nothing_while_its_name_cannot_be_resolved(stack: Named) -> None:
    """Kubernetes' name server may be lost with the same node."""
    one, _, three = HOSTS
    stack.name()
    with (
        Client([stack.addresses(one)["listen"], stack.addresses(three)["listen"]]) as moving,
        Client(stack.addresses(three)["listen"]) as staying,
    ):
        undisturbed = heard_of([Stream(staying, number) for number in range(STREAMS)])
        streams = [Stream((moving, staying)[number % 2], number) for number in range(STREAMS)]
        wait_until(partial(speaks, streams[::2]), "speech comes", ANSWERS_S)
        stack.kill(one)
        check_heard(streams, undisturbed)
    # It comes back where it was.
    stack.start(one)
    wait_until(lambda: stack.whole(one), "it has all stages")
