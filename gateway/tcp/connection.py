"""One TCP client's connection, with many requests on it."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from gateway.access.access import Access
from gateway.access.account import NO_KEY, Principal
from gateway.fairness.thread import FairThread
from gateway.fairness.uploads import UploadRoom
from gateway.input.tools import CallParser, with_calls, with_tools
from gateway.manager import Gateway
from gateway.requests.response_stream import ResponseStream
from gateway.tcp.incoming import Incoming, require_few_values
from omnirelay import error_codes
from omnirelay.content import media_of
from omnirelay.errors import (
    BusyError,
    CancelledRequestError,
    InvalidRequestError,
    MessageError,
    OmniRelayError,
    RequestError,
    SlowUploadError,
    UnauthenticatedError,
    VersionError,
    said,
)
from omnirelay.events import ErrorEvent
from omnirelay.protocol import (
    PIECE_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    ClientMessage,
    GenerateRequest,
    Hello,
    Piece,
    Ping,
    Pong,
    Refusal,
    Reply,
    ServerMessage,
    StatusQuery,
    StatusReply,
    Submit,
    pack,
    read_frame,
    read_length,
    read_pieces,
)
from omnirelay.status import StatusReport
from shared.log import LIMITED, limited

Reading = Callable[[], Awaitable[tuple[GenerateRequest, CallParser]]]
"""Awaits the complete request, and what finds an answer's calls."""
HELLO_TIMEOUT_S: Final = 10.0
STALL_S: Final = 60.0
"""How long a client may take to read a part of what is to be sent, of ``PIECE_BYTES``, as over HTTP."""
FAREWELL_S: Final = 1.0
"""How long a connection that is being closed may take its last events."""
MAX_WITH_TOOLS_BYTES: Final = 2**22
"""Of a request without its media: more than any prompt holds, and described in milliseconds."""
MAX_ENDED_EARLY: Final = 1000
"""Uploads of a connection that ended before their last piece, remembered; the oldest is forgotten first."""
_DECODER: Final = msgspec.msgpack.Decoder[ClientMessage](ClientMessage)
_REQUEST_DECODER: Final = msgspec.msgpack.Decoder(GenerateRequest)
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Connection:
    """One client's connection; if the client closes it, or its sending side, all its requests are cancelled.

    Attributes:
        _name: Of the connection, in the log.
        _refused: Counts rejected messages by error code.
        _parsing: Describes functions of clients in turn.
        known: Called with the connection's share once the client has identified itself.
        _cancels: Cancel what is not answered yet: later its last event would be lost.
    """

    _gateway: Gateway
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _name: str
    _access: Access
    _uploads: UploadRoom
    _status: Callable[[], StatusReport]
    _refused: Counter[str]
    _parsing: FairThread
    known: Callable[[str], object] = lambda _: None
    _max_frame_bytes: int = 0
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _cancels: dict[int, Callable[[], object]] = field(default_factory=dict)
    _incoming: dict[int, Incoming] = field(default_factory=dict)
    _ended_early: dict[int, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Replaced once the client has identified itself.
        self._account = self._access.account(self._name, Principal(self._name, known=False))
        self._address: str = (self._writer.get_extra_info("peername") or ("unknown",))[0]
        self._share = self._access.share(self._account.client, self._address)

    async def serve(self) -> None:
        """Serve the client until it disconnects or breaks the protocol."""
        log.debug("%s connected", self._account.name)
        try:
            await self._greet()
            while True:
                await self._handle(await self._read())
        except (MessageError, UnauthenticatedError, BusyError, TimeoutError) as error:
            await self._say_why(error)
        # Errors of TLS and of the network are no ConnectionErrors.
        except (asyncio.IncompleteReadError, OSError) as error:
            log.debug("%s went away: %s", self._account.name, error)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _greet(self) -> None:
        """Agree on the version and identify the client; without a needed key it may only query the status."""
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            message = self._decode(await read_frame(self._reader, PIECE_BYTES))
        if not isinstance(message, Hello):
            raise MessageError("the first message must be a hello")
        if message.version != PROTOCOL_VERSION:
            raise VersionError(
                f"the client uses protocol version {message.version}, this gateway {PROTOCOL_VERSION}"
            )
        if message.key is not None or not self._access.keys.needed:
            client = self._access.client(message.key, self._name)
            self._account = self._access.account(self._name, client)
        self._share = self._access.share(self._account.client, self._address)
        self.known(self._share)
        welcome = self._access.welcome(self._account.client)
        self._max_frame_bytes = welcome.max_frame_bytes or 0
        await self._send(welcome)

    async def _read(self) -> bytearray:
        """Read the next frame; memory is taken as bytes arrive, and BusyError raised if it was needed."""
        client = self._account.client
        async with asyncio.timeout(None if client.known else HELLO_TIMEOUT_S):
            length = await read_length(self._reader, self._max_frame_bytes)
        if length > PIECE_BYTES and not client.known:
            raise UnauthenticatedError(NO_KEY)
        try:
            async with self._uploads.reading(self._share) as upload:
                async for piece in read_pieces(self._reader, length):
                    upload.add(piece)
                return upload.finish()
        except SlowUploadError as error:
            raise MessageError(f"a frame of {length} bytes comes too slowly: {error}") from error

    async def _say_why(self, error: MessageError | UnauthenticatedError | BusyError | TimeoutError) -> None:
        """Tell the client why its connection is closed."""
        known = MessageError("timeout: no message arrived") if isinstance(error, TimeoutError) else error
        # Only the code: the message may quote what the client sent.
        limited(log).warning("closed the connection of %s: %s", self._account.name, known.code)
        self._count(known)
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._send(Refusal(known.code, str(known)))
        except OSError as lost:
            log.debug("%s was not told why: %r", self._account.name, lost)

    def _decode(self, body: bytearray) -> ClientMessage:
        try:
            return _DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"message cannot be read: {said(error)}") from error

    async def _handle(self, body: bytearray) -> None:
        """Process one message; an invalid one does not affect the rest of the connection."""
        try:
            await require_few_values(body)
            message = self._decode(body)
            if isinstance(message, Submit):
                if await self._may_begin(message.id):
                    self._begin(message.id, partial(self._read_request, message.request))
            elif isinstance(message, Piece):
                await self._take_piece(message)
            elif isinstance(message, Cancel):
                self._cancels.get(message.id, lambda: None)()
            elif isinstance(message, StatusQuery):
                await self._send(StatusReply(message.id, self._status()))
            elif isinstance(message, Ping):
                await self._send(Pong())
            else:
                raise MessageError("a second hello")
        except MessageError as error:
            self._count(error)
            limited(log).warning("rejected a message of %s: %s", self._account.name, error.code)
            await self._send(Refusal(error.code, str(error)))
        # A client that sends without pause must not starve the event loop.
        await asyncio.sleep(0)

    @property
    def idle(self) -> bool:
        """No request is being received or answered."""
        return not self._tasks

    def hang_up(self, abort: bool) -> None:
        """Close the connection, at once or after pending writes."""
        if abort:
            self._writer.transport.abort()
        else:
            self._writer.close()

    async def answered(self) -> None:
        """Wait until every request has its last event."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _take_piece(self, piece: Piece) -> None:
        if piece.offset > 0 and piece.id in self._ended_early:
            if piece.last:
                del self._ended_early[piece.id]
            return
        if piece.offset == 0 or piece.id not in self._incoming:
            if not await self._may_begin(piece.id):
                if not piece.last:
                    self._note_ended_early(piece.id)
                return
            self._ended_early.pop(piece.id, None)
            incoming = self._incoming[piece.id] = Incoming(self._uploads, self._share, self._max_frame_bytes)
            task = self._begin(piece.id, partial(self._collect, incoming))
            task.add_done_callback(lambda _: incoming.close())
        self._incoming[piece.id].add(piece)
        if piece.last:
            del self._incoming[piece.id]

    def _note_ended_early(self, client_id: int) -> None:
        """An upload was refused or cancelled: its remaining pieces are dropped without an answer."""
        self._ended_early[client_id] = None
        while len(self._ended_early) > MAX_ENDED_EARLY:
            del self._ended_early[next(iter(self._ended_early))]

    async def _may_begin(self, client_id: int) -> bool:
        """Whether a request may begin (else the client is told); MessageError if its id is in use."""
        if client_id in self._tasks:
            raise MessageError(f"request {client_id} is still being answered")
        if len(self._tasks) < self._account.max_requests:
            return True
        # Awaited here, so that a client that never reads is not read either.
        await self._finish(client_id, self._told(self._account.busy()))
        return False

    def _begin(self, client_id: int, read: Reading) -> asyncio.Task[None]:
        task = self._tasks[client_id] = asyncio.create_task(self._answer(client_id, read))
        self._cancels[client_id] = partial(task.cancel, "by the client")
        task.add_done_callback(lambda _: self._forget(client_id))
        return task

    def _forget(self, client_id: int) -> None:
        self._tasks.pop(client_id, None)
        if self._incoming.pop(client_id, None) is not None:
            self._note_ended_early(client_id)

    async def _answer(self, client_id: int, read: Reading) -> None:
        """Send the events of one request."""
        opening = self._open(read)
        # Frees the request's files when it ends, not when the client has read the whole answer.
        del read
        try:
            opened = await opening
        finally:
            del self._cancels[client_id]
        if isinstance(opened, ErrorEvent):
            await self._finish(client_id, opened)
            return
        stream, parser = opened
        self._cancels[client_id] = stream.cancel
        try:
            async for event in stream:
                if isinstance(event, ErrorEvent):
                    self._gateway.metrics.told("tcp", event.code)
                await self._send(Reply(client_id, with_calls(event, parser)))
        except OSError as error:
            log.debug("%s went away: %s", self._account.name, error)
        finally:
            del self._cancels[client_id]
            stream.close()

    async def _open(self, read: Reading) -> tuple[ResponseStream, CallParser] | ErrorEvent:
        """Submit a request; an error event tells why it was rejected."""
        try:
            request, parser = await read()
            return await self._gateway.submit(request, self._account), parser
        except RequestError as error:
            return self._told(error)
        except asyncio.CancelledError as cancelled:
            if cancelled.args != ("by the client",):
                raise
            return error_codes.to_event(CancelledRequestError("the client cancelled the request"))
        except Exception as error:
            # For example from a checkpoint's chat template; the client must get an answer.
            log.exception("a request of %s failed unexpectedly", self._account.name, extra=LIMITED)
            return self._told(OmniRelayError(f"unexpected error: {error!r}"))

    def _told(self, error: OmniRelayError) -> ErrorEvent:
        self._gateway.metrics.told("tcp", error.code)
        return error_codes.to_event(error)

    def _count(self, error: OmniRelayError) -> None:
        self._refused[error.code] += 1
        self._gateway.metrics.told("tcp", error.code)

    async def _finish(self, client_id: int, event: ErrorEvent) -> None:
        try:
            await self._send(Reply(client_id, event))
        except OSError as lost:
            log.debug("%s went away: %s", self._account.name, lost)

    async def _collect(self, incoming: Incoming) -> tuple[GenerateRequest, CallParser]:
        # Reject before any byte is kept.
        self._account.client.check()
        return await self._read_request(await incoming.whole())

    async def _read_request(self, raw: msgspec.Raw) -> tuple[GenerateRequest, CallParser]:
        try:
            request = _REQUEST_DECODER.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"the request is not valid: {said(error)}") from error
        # Without a needed key it is refused, and takes no time before.
        if not self._account.client.known or not (request.tools or request.tool_choice is not None):
            return request, CallParser()
        media = sum(part.nbytes for _, part in media_of(request.messages))
        if request.tools and memoryview(raw).nbytes - media > MAX_WITH_TOOLS_BYTES:
            raise InvalidRequestError(
                f"tools and messages may have {MAX_WITH_TOOLS_BYTES} bytes besides media", "tools"
            )
        hold = self._gateway.held.of(self._account.share)
        try:
            hold.grow(media)
            # Schemas that a call must obey are read in Python, which takes up to a second.
            return await self._parsing.run(hold.client, with_tools, request)
        finally:
            hold.release()

    async def _send(self, message: ServerMessage) -> None:
        """Write a frame, one at a time; OSError if the client is gone, or reads nothing for long."""
        frame = pack(message)
        # Frames that wait for this are counted in their response streams.
        async with self._sending:
            # In parts: who reads a long frame slowly still reads.
            for start in range(0, len(frame), PIECE_BYTES):
                self._writer.write(frame[start : start + PIECE_BYTES])
                if not self._writer.transport.get_write_buffer_size() and not self._writer.is_closing():
                    # The system took all of it: nothing to wait for.
                    continue
                try:
                    async with asyncio.timeout(STALL_S):
                        await self._writer.drain()
                except TimeoutError:
                    self.hang_up(abort=True)
                    limited(log).info("hung up on %s, which reads nothing", self._account.name)
                    raise ConnectionAbortedError(f"nothing was read for {STALL_S:.0f} s") from None
