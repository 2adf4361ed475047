"""Garbage on every socket of the running stack, and strangers at one with keys, harm nobody."""

from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
import zmq

from omnirelay import Answer, Client, SamplingOverrides, StatusReport
from omnirelay.errors import OmniRelayError
from shared.messages import ROLES
from shared.transport.keys import load_keys, make_keys
from tests.support.garbage import lies, noise, push
from tests.support.processes import wait_until
from tests.support.stack import RunningStack, make_config

SETTLED_S = 60.0
TEXT = SamplingOverrides(max_tokens=10)
CODEC = SamplingOverrides(max_tokens=40)


def inboxes(stack: RunningStack) -> dict[str, str]:
    addresses = {name: each["inbox"] for name, each in stack.config["stages"].items()}
    return addresses | {"events": stack.config["gateway"]["events"]}


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
        running = [start(client) for _ in "1234"]
        for address in inboxes(stack).values():
            push(address, messages)
        for answer in running:
            done = answer.result().done
            assert (done.text_token_ids, done.codec_token_ids) == expected
        wait_until(lambda: refused(client.status()) >= before + len(messages), "all are refused", SETTLED_S)
        assert {stage.state for stage in client.status().stages} == {"ready"}
        assert ask(client) == expected


MARK = "xyzzyPlugh"


def knock(address: str) -> None:
    """Connect as a process without keys does; it is hung up on, and nothing is delivered."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.set(zmq.LINGER, 0)
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        stranger.connect(address)
        stranger.send(b"spam")
        assert monitor.poll(10_000)
        assert int.from_bytes(monitor.recv_multipart()[0][:2], "little") == zmq.EVENT_DISCONNECTED
        stranger.disable_monitor()
        monitor.close()


def say_all_that_could_be_logged(address: str) -> None:
    """Requests whose every part is marked: one that is answered, and one for each stage that refuses."""
    limits = SamplingOverrides(max_tokens=20)
    with Client(address) as client:
        client.chat(f"My name is {MARK}.", text_sampling=limits, codec_sampling=limits).result()
        for options in (
            {"images": f"\x89PNG\r\n\x1a\n{MARK}".encode()},
            {"audio": b"RIFF\0\0\0\0WAVEfmt " + MARK.encode()},
            {"videos": b"\0\0\0\x18ftypmp42" + MARK.encode() * 9},
            {"speaker": MARK},
        ):
            with suppress(OmniRelayError):
                client.chat(MARK, **options).result()


def ports_open_to_others(pid: int) -> list[str]:
    """What the processes of a stack listen on that is not on the loopback, whoever of them opened it."""
    launcher = psutil.Process(pid)
    listening = [
        connection
        for process in (launcher, *launcher.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 8
    return [
        f"{connection.laddr.ip}:{connection.laddr.port}"
        for connection in listening
        if not ip_address(connection.laddr.ip).is_loopback
    ]


def answer_at(address: str) -> tuple[list[int], list[int], float]:
    with Client(address) as client:
        limits = SamplingOverrides(max_tokens=20)
        done = client.chat("Who?", seed=3, text_sampling=limits, codec_sampling=limits).result().done
        return done.text_token_ids, done.codec_token_ids, done.audio_seconds


@pytest.mark.long
def test_a_stack_with_keys_answers_as_one_without_and_hears_no_stranger(
    stack: RunningStack, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys", replace=False)
    config = make_config(tiny_checkpoint, security={"keys": str(tmp_path / "keys")}, log_level="debug")
    with RunningStack(config, tmp_path) as keyed:
        for address in (*inboxes(keyed).values(), config["gateway"]["control"]):
            knock(address)
        assert answer_at(keyed.address) == answer_at(stack.address)
        with Client(keyed.address) as client:
            assert client.status().refused == {}
        say_all_that_could_be_logged(keyed.address)
        strangers_ports = ports_open_to_others(keyed.process.pid)
    assert strangers_ports == []
    output = "".join(keyed.output)
    assert "DEBUG thinker" in output or "INFO thinker" in output
    assert MARK not in output
    for role in ROLES:
        assert load_keys(tmp_path / "keys", role).secret.decode() not in output
    assert [line for line in keyed.output if "a connection was refused: " in line]
    assert not [line for line in keyed.output if "refused a message" in line]
