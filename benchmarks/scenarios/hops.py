"""A message's way between two processes, through the queues that the stages use.

``python -m benchmarks.scenarios.hops ADDRESS ADDRESS ADDRESS [KEYS]`` is the receiving process, and
``python -m benchmarks.scenarios.hops compute`` one that computes beside it.
"""

import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import zmq

from benchmarks.adapters.omnirelay import free_addresses
from benchmarks.measure.results import Measured
from omnirelay.errors import OmniRelayError
from shared.config import Config, StageConfig
from shared.messages import STAGES, ConditioningRows, ControlToGateway, Credit, TalkerInput
from shared.messages.payloads import (
    AdditionalInformationEntry,
    AdditionalInformationPayload,
    Blob,
    PromptEmbedsPayload,
)
from shared.stage.process import lower_priority
from shared.transport.control import MAX_CONTROL_BYTES, ControlClient
from shared.transport.curve import open_context
from shared.transport.keys import make_keys
from shared.transport.queues import PullQueue, PushQueue, Sending
from shared.transport.sockets import bind
from shared.transport.wire import Decoder, encode

ALL: Final = "all, ms"
ROW: Final = (1, 1024)
PROMPT: Final = (1465, 3584)
"""Rows of a long prompt on the released checkpoint's width: 21 MB."""
CHUNK: Final = (1, 46_080)
"""As many bytes as the speech of eight blocks."""
COMPUTING: Final = len(STAGES)
"""Processes that compute while the chunks are sent, as nice as stages."""
PAUSE_S: Final = 0.005
"""Between two messages, so that the receiver waits as an idle stage does."""
WARM_UP: Final = 5
ANSWER_S: Final = 20
IDENTITY: Final = "thinker.hops"


def rows_message(shape: tuple[int, int], data: bytes | bytearray) -> ConditioningRows:
    """Conditioning rows float32 of this shape."""
    count = shape[0]
    positions = AdditionalInformationEntry(
        tensor_data=Blob(bytes(3 * count * 4)), tensor_shape=(3, count), tensor_dtype="int32"
    )
    return ConditioningRows(
        request_id="hop",
        seq=0,
        start=0,
        rows=PromptEmbedsPayload(shape=shape, dtype="float32", data=Blob(data)),
        additional=AdditionalInformationPayload(entries={"mrope_positions": positions}),
    )


def measure_hops(repeats: int) -> list[Measured]:
    """Send a row, and a long prompt's rows, to another process, over and over; then the same encrypted."""
    quiet = [("one row", ROW, repeats), ("a prompt of 21 MB", PROMPT, max(5, repeats // 10))]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as computing:
        keys = Path(directory, "keys")
        make_keys(keys, replace=False)
        encrypted = [(f"{name}, CURVE", shape, count) for name, shape, count in quiet]
        found = [*_between_processes(quiet), *_between_processes(encrypted, str(keys))]
        for _ in range(COMPUTING):
            # In a session of its own, as the launcher starts stages.
            computing.callback(_stop, _start("compute"))
        name = f"a chunk while {COMPUTING} processes compute"
        return [*found, *_between_processes([(name, CHUNK, repeats)])]


def _start(*arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "benchmarks.scenarios.hops", *arguments]
    return subprocess.Popen(command, start_new_session=True)  # noqa: S603 - ours


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def compute() -> None:
    """Compute until the process is killed."""
    lower_priority(StageConfig.model_fields["niceness"].default)
    while True:
        pass


def _config(keys: str | None) -> Config:
    return Config.model_validate({"security": {"keys": keys}})


def _between_processes(
    messages: Sequence[tuple[str, tuple[int, int], int]], keys: str | None = None
) -> Iterator[Measured]:
    """Be the gateway, and another process the thinker: they send to each other."""
    forth, back, control = free_addresses(3)
    context = open_context(_config(keys), "gateway")
    gateway = _Gateway(context, forth, back, control)
    process = _start(forth, back, control, *([keys] if keys else []))
    try:
        for name, shape, count in messages:
            yield _hop(name, shape, gateway, count)
    finally:
        gateway.close()
        context.term()
        _stop(process)


class _Gateway:
    """The gateway's sockets: messages to the thinker, its answers, and the credit that it gives."""

    def __init__(self, context: Any, forth: str, back: str, control: str) -> None:
        self.sender = PushQueue[Any](context, forth, Sending("gateway.hops"), "thinker")
        self._answers = PullQueue[Any](context, back, TalkerInput)
        self._control = context.socket(zmq.ROUTER)
        bind(self._control, control)
        self._decoder = Decoder[ControlToGateway](ControlToGateway, MAX_CONTROL_BYTES)
        self._poller = zmq.Poller()
        for each in (self._answers.socket, self._control):
            self._poller.register(each, zmq.POLLIN)

    def answer(self) -> tuple[float, float]:
        """When the other process had the message, and how long it decoded."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            self.sender.flush()
            self._poller.poll(100)
            for message in self._answers.drain():
                at, decode_s = struct.unpack("<2d", message.rows.data.view)
                return at, decode_s
            self.take_credit()
        raise OmniRelayError("the receiving process does not answer")

    def take_credit(self) -> None:
        """Take note of what the other process has taken."""
        while self._control.poll(0):
            _, *frames = self._control.recv_multipart()
            message = self._decoder.decode(frames)
            if isinstance(message, Credit):
                self.sender.credit(message)

    def close(self) -> None:
        """Close the sockets."""
        self.sender.close()
        self._answers.close()
        self._control.close()


def _hop(name: str, shape: tuple[int, int], gateway: _Gateway, count: int) -> Measured:
    sender, values = gateway.sender, bytearray(4 * shape[0] * shape[1])
    figures: dict[str, list[float]] = {each: [] for each in ("encode, ms", "wire, ms", "decode, ms", ALL)}
    for number in range(WARM_UP + count):
        message = rows_message(shape, bytearray(values))
        time.sleep(PAUSE_S)
        gateway.take_credit()
        encoded = sender.sent.codec_seconds.total
        started = time.monotonic()
        sender.put(message)
        sender.flush()
        at, decode_s = gateway.answer()
        if number >= WARM_UP:
            total, encode_s = at - started, sender.sent.codec_seconds.total - encoded
            taken = (encode_s, total - encode_s - decode_s, decode_s, total)
            for each, seconds in zip(figures.values(), taken, strict=True):
                each.append(1000 * seconds)
    size = float(sum(map(len, encode(message))))
    return Measured(name, {"bytes": [size], **figures})


def receive(forth: str, back: str, gateway: str, keys: str | None = None) -> None:
    """Take messages as a stage's loop does, and answer with the time when each was there."""
    context = open_context(_config(keys), "thinker")
    inbox = PullQueue[Any](context, forth, TalkerInput)
    answers = PushQueue[Any](context, back, Sending(IDENTITY), "gateway")
    control = ControlClient(context, gateway, IDENTITY)
    # Silence means that the sender has gone.
    while inbox.socket.poll(1000 * ANSWER_S):
        decoded = inbox.received.codec_seconds.total
        for _ in inbox.drain():
            at = time.monotonic()
            figures = struct.pack("<2d", at, inbox.received.codec_seconds.total - decoded)
            decoded = inbox.received.codec_seconds.total
            answers.put(rows_message((1, 4), figures))
        for credit in inbox.take_credits():
            control.send(credit)


if __name__ == "__main__":
    if sys.argv[1:] == ["compute"]:
        compute()
    receive(*sys.argv[1:])
