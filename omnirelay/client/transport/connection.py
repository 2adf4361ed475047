"""One connection to one gateway, with any number of requests."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final, Protocol

import msgspec

from omnirelay.client.transport.outbox import Outbox, Pieces, UploadProgress
from omnirelay.errors import (
    ConfigError,
    GatewayUnreachableError,
    MessageError,
    OmniRelayError,
    UnauthenticatedError,
    VersionError,
    said,
)
from omnirelay.events import Event
from omnirelay.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    Hello,
    Ping,
    Refusal,
    Reply,
    ServerMessage,
    StatusQuery,
    StatusReply,
    Welcome,
    pack,
    parse_address,
    read_frame,
    read_length,
    read_pieces,
)
from omnirelay.status import StatusReport

MAX_REPLY_BYTES: Final = 512 * 2**20
CONNECT_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 1.0
"""How long a close may take to send what is unsent."""
TICK_S: Final = 0.5
PING_AFTER_TICKS: Final = 4
"""A gateway that has sent nothing for so long while a request is open is asked whether it is alive."""
SILENT_TICKS: Final = 14
"""After so long without a byte it is given up.  Ticks, because a client that was suspended heard nothing."""
_DECODER: Final = msgspec.msgpack.Decoder[ServerMessage](ServerMessage)
log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Who receives the events of a request."""

    def take(self, event: Event) -> bool:
        """Take an event, and return whether it is the last.

        Raises:
            MessageError: No gateway sends such an event.
        """
        ...

    def disconnected(self, error: OmniRelayError) -> None:
        """The connection has ended before the request."""
        ...


@dataclass(eq=False)
class Connection:
    """One connection; it cannot be used again after it has ended.

    Attributes:
        address: ``tcp://HOST:PORT`` or ``tls://HOST:PORT``.
        _api_key: Sent with the hello.
        _ca: As :class:`omnirelay.AsyncClient` takes it.
        _on_ended: Called with this when the connection ends by itself.
        limits: The gateway's.
        ended: Why the connection has ended; None while it is open.
        stopping: The gateway has refused a request because it is stopping.
        loop: The event loop that serves it.
    """

    address: str
    _api_key: str | None = field(repr=False)
    _ca: str | Path | ssl.SSLContext | None
    _on_ended: "Callable[[Connection], None]"
    limits: Welcome = field(default_factory=lambda: Welcome(PROTOCOL_VERSION))
    ended: OmniRelayError | None = None
    stopping: bool = False
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _ids: Iterator[int] = field(default_factory=lambda: count(1))
    _receivers: dict[int, Receiver] = field(default_factory=dict)
    _reports: dict[int, asyncio.Future[StatusReport]] = field(default_factory=dict)
    _writer: asyncio.StreamWriter | None = None
    _outbox: Outbox | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _silent_ticks: int = 0

    @property
    def usable(self) -> bool:
        """New requests can be sent."""
        return self._outbox is not None and self.ended is None and not self.stopping

    async def connect(self) -> None:
        """Connect.

        Raises:
            GatewayUnreachableError: No gateway answers at the address.
            VersionError: The gateway speaks another version of the protocol.
            UnauthenticatedError: Invalid API key.
            ConfigError: The address, the key or the CA file cannot be used.
        """
        host, port, tls = parse_address(self.address)
        context = self._context() if tls else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, self._writer = await asyncio.open_connection(host, port, ssl=context)
                self.limits = await self._greet(reader, self._writer)
        except (OSError, EOFError, ValueError, OmniRelayError, asyncio.CancelledError) as error:
            await self.close()
            if isinstance(error, OmniRelayError | asyncio.CancelledError):
                raise
            raise self._in_words(error, tls) from error
        self._outbox = Outbox(self._writer)
        self._tasks = [asyncio.create_task(self._receive(reader)), asyncio.create_task(self._outbox.run())]
        if self.limits.resumes:
            self._tasks.append(asyncio.create_task(self._watch(self._outbox, self._writer)))

    async def close(self) -> None:
        """Disconnect; the gateway cancels requests that have not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(GatewayUnreachableError("the client was closed"))
        if self._writer is not None:
            self._writer.close()
            try:
                async with asyncio.timeout(CLOSE_S):
                    # Whoever is cancelled in wait_closed cancels it for all that wait.
                    await asyncio.shield(self._writer.wait_closed())
            except OSError as error:
                # Lost before; or the gateway was sending, which TLS reports as an error; or it reads nothing.
                log.debug("the connection was not closed cleanly: %r", error)
                self._writer.transport.abort()

    def submit(self, pieces: Pieces, receiver: Receiver) -> tuple[int, UploadProgress]:
        """Send a request, and return its id on this connection and how much of it has been sent.

        Raises:
            GatewayUnreachableError: There is no connection.
        """
        client_id = next(self._ids)
        upload = self._connected().submit(client_id, pieces, self.limits)
        self._receivers[client_id] = receiver
        return client_id, upload

    def cancel(self, client_id: int) -> bool:
        """Cancel a request; the rest of its upload is not sent.

        Returns:
            Whether none of it had been sent: no event follows.
        """
        outbox = self._connected()
        if not outbox.withdraw(client_id):
            outbox.say(pack(Cancel(client_id)))
            return False
        self._receivers.pop(client_id, None)
        return True

    async def status(self) -> StatusReport:
        """Ask for the status of the stack.

        Raises:
            GatewayUnreachableError: The connection was lost.
        """
        client_id = next(self._ids)
        report: asyncio.Future[StatusReport] = asyncio.get_running_loop().create_future()
        self._connected().say(pack(StatusQuery(client_id)))
        self._reports[client_id] = report
        return await report

    def _in_words(self, error: Exception, tls: bool) -> OmniRelayError:
        """Why there is no connection, and what may help."""
        bare = self.address.partition("://")[2]
        if isinstance(error, ssl.SSLCertVerificationError):
            why = f"the certificate of {self.address} was rejected: {error.verify_message} (pass its CA file "
            why += "as ca or --ca)"
        elif isinstance(error, EOFError | ConnectionResetError | BrokenPipeError):
            hint = "" if tls else f"; if it speaks TLS, use tls://{bare}"
            why = f"{self.address} closed the connection without an answer{hint}"
        elif isinstance(error, ssl.SSLError):
            why = f"the TLS handshake with {self.address} failed ({error.reason}); without TLS, use tcp://{bare}"
        elif isinstance(error, TimeoutError) and self._writer is not None:
            why = f"what listens at {self.address} has not answered within {CONNECT_TIMEOUT_S:g} s: "
            why += "it hangs, or is stopped"
        elif isinstance(error, OSError):
            reason = "timeout" if isinstance(error, TimeoutError) else error
            why = f"no gateway answers at {self.address}: {reason}; start it with `omnirelay up`"
        else:
            # A name that no host can have, or a key of what is not Unicode.
            return ConfigError(f"cannot connect to {self.address}: {error}")
        return GatewayUnreachableError(why)

    def _context(self) -> ssl.SSLContext:
        """The SSL context; ConfigError if the CA file is unusable."""
        if isinstance(self._ca, ssl.SSLContext):
            return self._ca
        try:
            return ssl.create_default_context(cafile=self._ca)
        except ssl.SSLError as error:
            raise ConfigError(f"{self._ca} holds no certificates in PEM: {error.reason or error}") from error
        except OSError as error:
            raise ConfigError(
                f"cannot read the authority's certificate {self._ca}: {error.strerror}"
            ) from error

    def _connected(self) -> Outbox:
        if self.ended is not None:
            raise self.ended
        if self._outbox is None:
            raise GatewayUnreachableError("the client is not connected")
        return self._outbox

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Welcome:
        writer.write(pack(Hello(PROTOCOL_VERSION, "omnirelay-python", self._api_key)))
        try:
            frame = await read_frame(reader, MAX_REPLY_BYTES)
        except MessageError as error:
            raise GatewayUnreachableError(
                f"what listens at {self.address} does not speak the gateway's TCP protocol; "
                "its port is gateway.listen, 5555 by default, and not that of HTTP"
            ) from error
        answer = self._decode(frame)
        if isinstance(answer, Refusal):
            raise _refusal(answer)
        if not isinstance(answer, Welcome):
            raise MessageError("the gateway did not answer the hello")
        return answer

    def _decode(self, body: bytearray) -> ServerMessage:
        try:
            message: ServerMessage = _DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"the gateway sent an invalid message: {said(error)}") from error
        return message

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Pass messages on to their requests until the connection ends."""
        try:
            while True:
                body = bytearray()
                async for piece in read_pieces(reader, await read_length(reader, MAX_REPLY_BYTES)):
                    self._silent_ticks = 0
                    body += piece
                self._take(self._decode(body))
        except (OSError, asyncio.IncompleteReadError) as error:
            log.debug("connection lost: %r", error)
            self._end(GatewayUnreachableError(f"the connection to {self.address} was lost"))
        except OmniRelayError as error:
            self._end(error)

    async def _watch(self, outbox: Outbox, writer: asyncio.StreamWriter) -> None:
        """Give up a gateway that is silent although it was asked."""
        written = 0
        while self.ended is None:
            await asyncio.sleep(TICK_S)
            if not (self._receivers or self._reports) or outbox.written_bytes > written:
                # Nothing is expected, or an upload advances.
                self._silent_ticks, written = 0, outbox.written_bytes
                continue
            self._silent_ticks += 1
            if self._silent_ticks == PING_AFTER_TICKS:
                outbox.say(pack(Ping()))
            elif self._silent_ticks == SILENT_TICKS:
                self._end(
                    GatewayUnreachableError(
                        f"{self.address} has not answered for {SILENT_TICKS * TICK_S:g} s"
                    )
                )
                # A close would wait for the peer to read what is unsent.
                writer.transport.abort()

    def _take(self, message: ServerMessage) -> None:
        if isinstance(message, Reply):
            receiver = self._receivers.get(message.id)
            if receiver is not None and receiver.take(message.event):
                self._receivers.pop(message.id, None)
                if self._outbox is not None:
                    # The gateway rejected the request during its upload.
                    self._outbox.withdraw(message.id)
        elif isinstance(message, StatusReply):
            report = self._reports.pop(message.id, None)
            if report is not None and not report.done():
                report.set_result(message.report)
        elif isinstance(message, Refusal):
            raise _refusal(message)

    def _end(self, error: OmniRelayError) -> None:
        if self.ended is not None:
            return
        self.ended = error
        self._on_ended(self)
        receivers, self._receivers = list(self._receivers.values()), {}
        for receiver in receivers:
            receiver.disconnected(error)
        for report in self._reports.values():
            if not report.done():
                report.set_exception(error)
        self._reports.clear()


def _refusal(refused: Refusal) -> OmniRelayError:
    """The error for which the gateway rejected a message."""
    for kind in (VersionError, UnauthenticatedError):
        if refused.code == kind.code:
            return kind(refused.message)
    return MessageError(f"the gateway rejected a message: {refused.message}")
