"""The asyncio client: one connection, any number of concurrent requests."""

import asyncio
import logging
import ssl
import time
from collections import deque
from itertools import count
from pathlib import Path
from typing import Final, Self

import msgspec

from omnirelay import error_codes, events
from omnirelay.client.outbox import Outbox, UploadProgress, request_pieces
from omnirelay.client.request import build_request, taking_options_of
from omnirelay.client.tls import client_context
from omnirelay.client.types import DEFAULT_ADDRESS, ChatEvent, ChatResult, TimedDoneEvent, collect
from omnirelay.errors import (
    CancelledRequestError,
    GatewayUnreachableError,
    MessageError,
    OmniRelayError,
    UnauthenticatedError,
    VersionError,
    said,
)
from omnirelay.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    GenerateRequest,
    Hello,
    Refusal,
    Reply,
    ServerMessage,
    StatusQuery,
    StatusReply,
    Welcome,
    pack,
    parse_address,
    read_frame,
)
from omnirelay.status import StatusReport
from omnirelay.values import SAMPLE_BYTES

MAX_REPLY_BYTES: Final = 512 * 2**20
CONNECT_TIMEOUT_S: Final = 5.0
log = logging.getLogger(__name__)


class AsyncAnswer:
    """The events of one request, to be iterated once; buffered without limit until taken.

    Attributes:
        request_id: The gateway's id of the request; None until it is accepted.
        upload: How much of the request has been sent.
    """

    def __init__(self, client: "AsyncClient", client_id: int, upload: UploadProgress) -> None:
        self.request_id: str | None = None
        self.upload: Final = upload
        self._client = client
        self._client_id = client_id
        self._sent = time.monotonic()
        self._first_text: float | None = None
        self._first_audio: float | None = None
        self._waiting: deque[ChatEvent] = deque()
        self._error: OmniRelayError | None = None
        self._ended = False
        self._arrived = asyncio.Event()

    def cancel(self) -> None:
        """Cancel the request; iterating then raises :class:`CancelledRequestError`."""
        if not self._ended:
            self._client.cancel(self._client_id)

    async def result(self) -> ChatResult:
        """Wait for the whole answer.

        Raises:
            RequestError: The request failed.
            GatewayUnreachableError: The connection was lost.
        """
        return collect([event async for event in self])

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChatEvent:
        """Give the next event.

        Raises:
            RequestError: The request failed; subclasses say why.
            GatewayUnreachableError: The connection was lost.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    def take(self, event: events.Event) -> bool:
        """Add a received event, and return whether it is the last.  For the client's own use.

        Raises:
            MessageError: No gateway sends such an event.
        """
        elapsed = time.monotonic() - self._sent
        if isinstance(event, events.AcceptedEvent):
            self.request_id = event.request_id
        elif isinstance(event, events.TextEvent):
            self._first_text = self._first_text or elapsed
            self._waiting.append(event)
        elif isinstance(event, events.AudioEvent):
            if len(event.pcm) % SAMPLE_BYTES:
                raise MessageError(f"the gateway sent {len(event.pcm)} bytes of audio, no whole samples")
            if event.pcm:
                self._first_audio = self._first_audio or elapsed
            self._waiting.append(event)
        elif isinstance(event, events.DoneEvent):
            self._waiting.append(self._done(event, elapsed))
            self._ended = True
        else:
            self.fail(error_codes.from_event(event))
        self._arrived.set()
        return self._ended

    def fail(self, error: OmniRelayError) -> None:
        """End with an error.  For the client's own use."""
        if not self._ended:
            self._error = error
            self._ended = True
            self._arrived.set()

    def _done(self, event: events.DoneEvent, wall_s: float) -> TimedDoneEvent:
        return TimedDoneEvent(
            **msgspec.structs.asdict(event),
            ttft_s=self._first_text,
            ttfa_s=self._first_audio,
            wall_s=wall_s,
        )


class AsyncClient:
    """A connection to a gateway; use it with ``async with``.

    Args:
        address: ``tcp://HOST:PORT``, or ``tls://HOST:PORT`` if the gateway speaks TLS.
        api_key: The API key, if the gateway requires one.
        ca: With ``tls://``, a CA file (PEM) or an SSL context; None is the system's trust store.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        api_key: str | None = None,
        ca: str | Path | ssl.SSLContext | None = None,
    ) -> None:
        self.address: Final = address
        self._api_key = api_key
        self._ca = ca
        self._ids = count(1)
        self._answers: dict[int, AsyncAnswer] = {}
        self._reports: dict[int, asyncio.Future[StatusReport]] = {}
        self._decoder = msgspec.msgpack.Decoder(ServerMessage)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._outbox: Outbox | None = None
        self._limits = Welcome(PROTOCOL_VERSION)
        self._tasks: list[asyncio.Task[None]] = []
        self._lost: OmniRelayError | None = None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect.

        Raises:
            GatewayUnreachableError: No gateway answers at the address.
            VersionError: The gateway speaks another version of the protocol.
            UnauthenticatedError: Invalid API key.
            ConfigError: The address or the CA file cannot be used.
        """
        host, port, tls = parse_address(self.address)
        context = self._context() if tls else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                self._reader, self._writer = await asyncio.open_connection(host, port, ssl=context)
                self._limits = await self._greet(self._reader, self._writer)
        except ssl.SSLCertVerificationError as error:
            await self.close()
            raise GatewayUnreachableError(
                f"the certificate of {self.address} was rejected: {error.verify_message} "
                "(pass its CA file as ca or --ca)"
            ) from error
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError) as error:
            await self.close()
            hint = "" if tls else f"; if it speaks TLS, use tls://{self.address.removeprefix('tcp://')}"
            raise GatewayUnreachableError(
                f"{self.address} closed the connection without an answer{hint}"
            ) from error
        except ssl.SSLError as error:
            await self.close()
            raise GatewayUnreachableError(
                f"the TLS handshake with {self.address} failed ({error.reason}); "
                f"without TLS, use tcp://{self.address.removeprefix('tls://')}"
            ) from error
        except (OSError, TimeoutError) as error:
            await self.close()
            raise GatewayUnreachableError(
                f"no gateway answers at {self.address}: {error or 'timeout'}; start it with `omnirelay up`"
            ) from error
        except OmniRelayError:
            await self.close()
            raise
        self._outbox = Outbox(self._writer)
        self._tasks = [
            asyncio.create_task(self._receive(self._reader)),
            asyncio.create_task(self._outbox.run()),
        ]

    async def close(self) -> None:
        """Disconnect; the gateway cancels requests that have not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(GatewayUnreachableError("the client was closed"))
        if self._writer is not None:
            self._writer.close()
            try:
                await self._writer.wait_closed()
            except OSError as error:
                # Lost before, or the gateway was sending, which TLS reports as an error.
                log.debug("the connection was not closed cleanly: %s", error)

    @taking_options_of(build_request)
    def chat(self, request: GenerateRequest) -> AsyncAnswer:
        """Send a request; iterating the answer gives its events, and raises what went wrong.

        Files are read, and samples and pixels encoded, before this returns.  Encode large media in a thread:
        ``await asyncio.to_thread(video, frames, fps=2.0)``.

        Raises:
            GatewayUnreachableError: There is no connection.
            MediaTooLargeError: Media exceed the gateway's limits.
            InvalidRequestError: A text is not Unicode, a number exceeds 64 bits, or the request is too long.
        """
        client_id = next(self._ids)
        pieces = request_pieces(request, self._limits)
        answer = AsyncAnswer(self, client_id, self._connected().submit(client_id, pieces, self._limits))
        self._answers[client_id] = answer
        return answer

    def cancel(self, client_id: int) -> None:
        """Cancel a request of this client; the rest of its upload is not sent."""
        outbox = self._connected()
        if not outbox.withdraw(client_id):
            outbox.say(pack(Cancel(client_id)))
        elif answer := self._answers.pop(client_id, None):
            answer.fail(CancelledRequestError("the request was cancelled before it was sent"))

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

    def _context(self) -> ssl.SSLContext:
        if isinstance(self._ca, ssl.SSLContext):
            return self._ca
        return client_context(Path(self._ca) if self._ca is not None else None)

    def _connected(self) -> Outbox:
        if self._lost is not None:
            raise self._lost
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
            message: ServerMessage = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"the gateway sent an invalid message: {said(error)}") from error
        return message

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Pass messages on to their requests until the connection ends."""
        try:
            while True:
                self._take(self._decode(await read_frame(reader, MAX_REPLY_BYTES)))
        except (OSError, asyncio.IncompleteReadError) as error:
            log.debug("connection lost: %r", error)
            self._fail_all(GatewayUnreachableError(f"the connection to {self.address} was lost"))
        except OmniRelayError as error:
            self._fail_all(error)

    def _take(self, message: ServerMessage) -> None:
        if isinstance(message, Reply):
            answer = self._answers.get(message.id)
            if answer is not None and answer.take(message.event):
                del self._answers[message.id]
                if self._outbox is not None:
                    # The gateway rejected the request during its upload.
                    self._outbox.withdraw(message.id)
        elif isinstance(message, StatusReply):
            report = self._reports.pop(message.id, None)
            if report is not None and not report.done():
                report.set_result(message.report)
        elif isinstance(message, Refusal):
            raise _refusal(message)

    def _fail_all(self, error: OmniRelayError) -> None:
        self._lost = error
        for answer in self._answers.values():
            answer.fail(error)
        self._answers.clear()
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
