"""Clients with one stream each, in one process: ``python -m benchmarks.gateway.clients --help``.

They do little more than note when each event has arrived, so that a core holds thousands of them.
"""

import argparse
import gc
import json
import select
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from omnirelay.errors import OmniRelayError
from omnirelay.events import AcceptedEvent, AudioEvent, ErrorEvent, TextEvent
from omnirelay.protocol import (
    LENGTH_BYTES,
    PROTOCOL_VERSION,
    GenerateRequest,
    Hello,
    Refusal,
    Reply,
    ServerMessage,
    Submit,
    pack,
    parse_tcp,
)
from shared.real_time import set_realtime_priority

Interface = Literal["tcp", "http"]
QUESTION: Final = "Hello! Who are you?"
SPEAKER: Final = "Chelsie"
READ_BYTES: Final = 2**18
_REQUEST_ID: Final = b"x-request-id: "
Received = dict[str, dict[str, list[float]]]
"""By request and kind, the monotonic times."""


class Parser(Protocol):
    """Finds the events in what a connection received."""

    request_id: str

    def request(self) -> bytes:
        """What the client sends."""
        ...

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the kind of each event that is complete; OmniRelayError if the stream ended."""
        ...


class TcpParser:
    """The protocol of :mod:`omnirelay.protocol`."""

    def __init__(self, model: str) -> None:
        del model
        self.request_id = ""
        self._buffer = bytearray()
        self._decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)

    def request(self) -> bytes:
        """See :class:`Parser`."""
        asked = GenerateRequest(prompt_text=QUESTION, speaker=SPEAKER)
        return pack(Hello(PROTOCOL_VERSION)) + pack(Submit(1, msgspec.Raw(msgspec.msgpack.encode(asked))))

    def feed(self, data: bytes) -> Iterator[str]:
        """See :class:`Parser`."""
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if len(self._buffer) < end:
                return
            message = self._decoder.decode(memoryview(self._buffer)[LENGTH_BYTES:end])
            del self._buffer[:end]
            if isinstance(message, Refusal):
                raise OmniRelayError(f"refused: {message.message}")
            if isinstance(message, Reply):
                event = message.event
                if isinstance(event, ErrorEvent):
                    raise OmniRelayError(f"a stream failed: {event.message}")
                if isinstance(event, AcceptedEvent):
                    self.request_id = event.request_id
                elif isinstance(event, TextEvent | AudioEvent):
                    yield "text" if isinstance(event, TextEvent) else "audio"


class HttpParser:
    """``/v1/chat/completions`` as server-sent events."""

    def __init__(self, model: str) -> None:
        self.request_id = ""
        self._model = model
        self._rest = b""

    def request(self) -> bytes:
        """See :class:`Parser`."""
        asked = {
            "model": self._model,
            "messages": [{"role": "user", "content": QUESTION}],
            "modalities": ["text", "audio"],
            "audio": {"voice": SPEAKER, "format": "pcm16"},
            "stream": True,
        }
        body = json.dumps(asked).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def feed(self, data: bytes) -> Iterator[str]:
        """See :class:`Parser`."""
        # Events end with an empty line, which may come in two pieces; the head of HTTP is before the first.
        *events, rest = (self._rest + data).split(b"\n\n")
        self._rest = rest
        if b"}" in rest and rest.startswith(b"HTTP/1.1 ") and not rest.startswith(b"HTTP/1.1 200"):
            raise OmniRelayError(f"refused: {rest!r}")
        for event in events:
            if not self.request_id:
                self.request_id = event.lower().partition(_REQUEST_ID)[2].partition(b"\r\n")[0].decode()
            if b'"error"' in event[:512]:
                raise OmniRelayError(f"a stream failed: {event!r}")
            if b'"transcript":' in event[:512]:
                yield "text"
            elif b'"data":' in event[:512]:
                yield "audio"


class Clients:
    """Opens connections one after the other, and reads all of them.

    Args:
        interface: How they ask.
        address: Of the gateway, ``tcp://HOST:PORT``.
        model: Its name over HTTP.
    """

    def __init__(self, interface: Interface, address: str, model: str) -> None:
        self._make = TcpParser if interface == "tcp" else HttpParser
        self._address = parse_tcp(address)
        self._model = model
        self._epoll = select.epoll()
        self._open: dict[int, tuple[socket.socket, Parser, dict[str, list[float]]]] = {}

    def run(self, starts: Sequence[float], until: float) -> Received:
        """Open a stream at each of these times, and read until another; all are monotonic.

        Raises:
            OmniRelayError: A stream was refused, or ended.
        """
        waiting = list(reversed(starts))
        while (now := time.monotonic()) < until:
            while waiting and waiting[-1] <= now:
                waiting.pop()
                self._connect()
            wake = min(waiting[-1] if waiting else until, until)
            for number, _ in self._epoll.poll(max(0.0, wake - time.monotonic())):
                self._read(number)
        return {parser.request_id: times for _, parser, times in self._open.values()}

    def _connect(self) -> None:
        connection = socket.create_connection(self._address)
        parser: Parser = self._make(self._model)
        connection.sendall(parser.request())
        connection.setblocking(False)
        self._open[connection.fileno()] = connection, parser, {"text": [], "audio": []}
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _read(self, number: int) -> None:
        connection, parser, times = self._open[number]
        data = connection.recv(READ_BYTES)
        now = time.monotonic()
        if not data:
            raise OmniRelayError("the gateway closed a connection")
        for kind in parser.feed(data):
            times[kind].append(now)


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold the streams and write the times of their events."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway.clients", description=__doc__)
    parser.add_argument("interface", choices=("tcp", "http"))
    parser.add_argument("address", metavar="tcp://HOST:PORT")
    parser.add_argument("--model", required=True, metavar="NAME", help="its name over HTTP")
    parser.add_argument("--starts", type=float, nargs="+", required=True, metavar="S", help="monotonic times")
    parser.add_argument("--until", type=float, required=True, metavar="S", help="monotonic time of the end")
    parser.add_argument("--received", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    set_realtime_priority()
    gc.disable()
    try:
        received = Clients(options.interface, options.address, options.model).run(
            options.starts, options.until
        )
    except (OmniRelayError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    options.received.write_bytes(msgspec.msgpack.encode(received))
    return 0


if __name__ == "__main__":
    sys.exit(main())
