"""A message's way between two processes, through the queues that the stages use.

``python -m benchmarks.parts.hops ADDRESS ADDRESS ADDRESS [KEYS]`` is the receiving process, and
``python -m benchmarks.parts.hops compute`` one that computes beside it.
"""

import asyncio
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import zmq

from benchmarks.measure.results import Hop
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
from shared.transport.curve import StackContext, open_context
from shared.transport.keys import Role, make_keys
from shared.transport.queues import PullQueue, PushQueue, Sending
from shared.transport.sockets import bind
from shared.transport.wire import Decoder, encode

ROW: Final = (1, 1024)
PROMPT: Final = (1465, 3584)
"""Rows of a long prompt on the released checkpoint's width: 21 MB."""
CHUNK: Final = (1, 46_080)
"""As many bytes as the speech of eight blocks."""
COMPUTING: Final = len(STAGES)
"""Processes that compute while the chunks are sent, as nice as stages."""
PAUSE_S: Final = 0.005
"""Between two messages, so that the receiver waits as an idle stage does."""
Messages = Sequence[tuple[str, tuple[int, int], int]]
"""Their names, shapes and numbers."""
WARM_UP: Final = 5
ANSWER_S: Final = 20
IDENTITY: Final = "thinker.hops"
Addresses = tuple[str, str, str]
"""Of the thinker's inbox, and of the gateway's sockets for answers and for control."""


def rows_message(shape: tuple[int, int], seq: int) -> ConditioningRows:
    """Conditioning rows float32 of this shape."""
    count, width = shape
    positions = AdditionalInformationEntry(
        tensor_data=Blob(bytes(3 * count * 4)), tensor_shape=(3, count), tensor_dtype="int32"
    )
    return ConditioningRows(
        request_id="hop",
        seq=seq,
        start=0,
        rows=PromptEmbedsPayload(shape=shape, dtype="float32", data=Blob(bytearray(count * width * 4))),
        additional=AdditionalInformationPayload(entries={"mrope_positions": positions}),
    )


async def measure_hops(repeats: int) -> list[Hop]:
    """Send a row, and a long prompt's rows, to another process, over and over; then the same encrypted."""
    with tempfile.TemporaryDirectory() as directory:
        make_keys(Path(directory, "keys"), replace=False)
        keys = str(Path(directory, "keys"))
        quiet = [("one row", ROW, repeats), ("a prompt of 21 MB", PROMPT, max(5, repeats // 10))]
        hops = await _between_processes(quiet) + await _between_processes(quiet, keys)
        busy = [await _compute() for _ in range(COMPUTING)]
        try:
            name = f"a chunk while {COMPUTING} processes compute"
            return hops + await _between_processes([(name, CHUNK, repeats)])
        finally:
            for process in busy:
                process.kill()
                await process.wait()


async def _compute() -> asyncio.subprocess.Process:
    # In a session of its own, as the launcher starts stages.
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.parts.hops", "compute"), start_new_session=True
    )


def compute() -> None:
    """Compute until the process is killed."""
    lower_priority(StageConfig.model_fields["niceness"].default)
    while True:
        pass


async def _between_processes(messages: Messages, keys: str | None = None) -> list[Hop]:
    addresses = _free_addresses()
    command = [sys.executable, "-m", "benchmarks.parts.hops", *addresses, *([keys] if keys else [])]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        return await asyncio.to_thread(_measure, addresses, messages, keys)
    finally:
        process.terminate()
        await process.wait()


def _context(role: Role, keys: str | None) -> StackContext:
    return open_context(Config.model_validate({"security": {"keys": keys}}), role)


class _Gateway:
    """The gateway's sockets: messages to the thinker, its answers, and the credit that it gives."""

    def __init__(self, context: StackContext, forth: str, back: str, control: str) -> None:
        self.sender = PushQueue[Any](context, forth, Sending("gateway.hops"), "thinker")
        self.answers = PullQueue[Any](context, back, TalkerInput)
        self._control = context.socket(zmq.ROUTER)
        bind(self._control, control)
        self._decoder = Decoder[ControlToGateway](ControlToGateway, MAX_CONTROL_BYTES)
        self._poller = zmq.Poller()
        for each in (self.answers.socket, self._control):
            self._poller.register(each, zmq.POLLIN)

    def answer(self) -> tuple[float, float]:
        """When the other process had the message, and how long it decoded."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            self.sender.flush()
            self._poller.poll(100)
            for message in self.answers.drain():
                at, decode_s = struct.unpack("<2d", message.rows.data.view)
                return at, decode_s
            self.take_credit()
        raise OmniRelayError("the receiving process does not answer")

    def take_credit(self) -> None:
        """Hear what the other process has taken."""
        while self._control.poll(0):
            _, *frames = self._control.recv_multipart()
            message = self._decoder.decode(frames)
            if isinstance(message, Credit):
                self.sender.credit(message)

    def close(self) -> None:
        """Close the sockets."""
        self.sender.close()
        self.answers.close()
        self._control.close()


def _measure(addresses: Addresses, messages: Messages, keys: str | None) -> list[Hop]:
    """Be the gateway, and the other process the thinker: they send to each other."""
    context = _context("gateway", keys)
    how = ", CURVE" if keys else ""
    gateway = _Gateway(context, *addresses)
    try:
        return [_hop(name + how, shape, gateway, count) for name, shape, count in messages]
    finally:
        gateway.close()
        context.term()


def _hop(name: str, shape: tuple[int, int], gateway: _Gateway, count: int) -> Hop:
    sender = gateway.sender
    totals, encodes, decodes = [], [], []
    size = sum(map(len, encode(rows_message(shape, 0))))
    for seq in range(WARM_UP + count):
        message = rows_message(shape, seq)
        time.sleep(PAUSE_S)
        gateway.take_credit()
        encoded = sender.sent.codec_seconds.total
        started = time.monotonic()
        sender.put(message)
        sender.flush()
        at, decode_s = gateway.answer()
        if seq >= WARM_UP:
            totals.append(1000 * (at - started))
            encodes.append(1000 * (sender.sent.codec_seconds.total - encoded))
            decodes.append(1000 * decode_s)
    wires = [total - coded - decoded for total, coded, decoded in zip(totals, encodes, decodes, strict=True)]
    return Hop(message=name, bytes=size, total_ms=totals, encode_ms=encodes, decode_ms=decodes, wire_ms=wires)


def receive(forth: str, back: str, gateway: str, keys: str | None = None) -> None:
    """Take messages as a stage's loop does, and tell when each was there."""
    context = _context("thinker", keys)
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
            answers.put(
                ConditioningRows(
                    request_id="hop",
                    seq=0,
                    start=0,
                    rows=PromptEmbedsPayload(shape=(1, 4), dtype="float32", data=Blob(figures)),
                    additional=rows_message((1, 4), 0).additional,
                )
            )
        for credit in inbox.take_credits():
            control.send(credit)


def _free_addresses() -> Addresses:
    with socket.socket() as first, socket.socket() as second, socket.socket() as third:
        for each in (first, second, third):
            each.bind(("127.0.0.1", 0))
        forth, back, control = (f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (first, second, third))
        return forth, back, control


if __name__ == "__main__":
    if sys.argv[1:] == ["compute"]:
        compute()
    receive(*sys.argv[1:])
