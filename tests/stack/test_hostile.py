"""Garbage on every socket of the running stack: it is refused, counted, and harms nobody."""

import random
import socket
import time
from collections.abc import Callable
from contextlib import closing

import pytest
import zmq

from omnirelay import Answer, Client, SamplingOverrides, StatusReport
from tests.support.garbage import lies, noise, push
from tests.support.stack import RunningStack

SETTLED_S = 60.0
TEXT = SamplingOverrides(max_tokens=10)
CODEC = SamplingOverrides(max_tokens=40)


def inboxes(stack: RunningStack) -> dict[str, str]:
    addresses = {name: each["inbox"] for name, each in stack.config["stages"].items()}
    return addresses | {"events": stack.config["gateway"]["events"]}


def until(client: Client, condition: Callable[[StatusReport], bool]) -> StatusReport:
    deadline = time.monotonic() + SETTLED_S
    while not condition(report := client.status()):
        assert time.monotonic() < deadline, report
    return report


def refused(report: StatusReport) -> int:
    at_stages = sum(stage.load.refused for stage in report.stages)
    return at_stages + sum(report.refused.values())


def start(client: Client) -> Answer:
    return client.chat("Who are you?", seed=3, text_sampling=TEXT, codec_sampling=CODEC)


def ask(client: Client) -> tuple[list[int], list[int]]:
    done = start(client).result().done
    return done.text_token_ids, done.codec_token_ids


@pytest.mark.parametrize("messages", [lies(), noise(300, seed=1)], ids=["lies", "noise"])
def test_garbage_on_the_inboxes_changes_no_answer(stack: RunningStack, messages: list[list[bytes]]) -> None:
    with Client(stack.address) as client:
        expected = ask(client)
        before = refused(client.status())
        running = [
            client.chat("Who are you?", seed=3, text_sampling=TEXT, codec_sampling=CODEC) for _ in "1234"
        ]
        for address in inboxes(stack).values():
            push(address, messages)
        for answer in running:
            done = answer.result().done
            assert (done.text_token_ids, done.codec_token_ids) == expected
        report = until(client, lambda report: refused(report) >= before + len(messages))
        assert {stage.state for stage in report.stages} == {"ready"}
        assert ask(client) == expected


def test_garbage_on_the_control_socket_is_refused(stack: RunningStack) -> None:
    with Client(stack.address) as client:
        before = refused(client.status())
        for identity in (b"thinker-of-somebody", b"x" * 200):
            with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
                peer.set(zmq.IDENTITY, identity)
                peer.set(zmq.LINGER, 5000)
                peer.connect(stack.config["gateway"]["control"])
                for frames in noise(50, seed=2):
                    peer.send_multipart(frames)
        until(client, lambda report: refused(report) >= before + 100)
        assert ask(client)[1]


def test_a_peer_that_is_no_zeromq_is_shut_out(stack: RunningStack) -> None:
    for address in [*inboxes(stack).values(), stack.config["gateway"]["control"], stack.address]:
        with closing(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))) as peer:
            peer.sendall(random.Random(3).randbytes(4096))
    with Client(stack.address) as client:
        assert ask(client)[1]
