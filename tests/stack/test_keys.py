"""The real stack with CURVE on every socket between its processes."""

from pathlib import Path

import zmq

from gateway.client import GatewayClient, SamplingOverrides
from shared.keys import make_keys
from tests.stack.test_hostile import inboxes
from tests.support.stack import RunningStack, make_config


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


def ask(address: str) -> tuple[list[int], list[int], float]:
    with GatewayClient(address) as client:
        limits = SamplingOverrides(max_tokens=20)
        done = client.chat("Who?", seed=3, text_sampling=limits, codec_sampling=limits).result().done
        assert client.status().refused == {}
        return done.text_token_ids, done.codec_token_ids, done.audio_seconds


def test_a_stack_with_keys_answers_as_one_without_and_hears_no_stranger(
    stack: RunningStack, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys", replace=False)
    config = make_config(tiny_checkpoint, security={"keys": str(tmp_path / "keys")})
    with RunningStack(config, tmp_path) as keyed:
        for address in (*inboxes(keyed).values(), config["gateway"]["control"]):
            knock(address)
        assert ask(keyed.address) == ask(stack.address)
    assert [line for line in keyed.output if "a connection was refused: " in line]
    assert not [line for line in keyed.output if "refused a message" in line]
