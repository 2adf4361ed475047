"""uvicorn's WebSockets, with limits on slow clients and on those that do not read."""

import logging
from codecs import getincrementaldecoder
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidHeader
from websockets.frames import CloseCode
from websockets.http11 import Request

from gateway.access.places import Place
from gateway.fairness.uploads import IncomingUpload, UploadRoom
from shared.http.protocol import PLACE, STALL_S, Alarm, SmallReads
from shared.log import limited

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

MAX_MESSAGE_BYTES: Final = 16 * 2**20
"""Size limit of a message; a larger one closes the connection."""
MAX_FRAGMENTS: Final = 2**16
"""Of a message: each takes more memory than its bytes, and time when the last one has come."""
UPLOADS: Final = "uploads"
"""Key of a connection's state that holds the memory for messages."""
log = logging.getLogger(__name__)


class BoundedWebSocket(WebSocketsSansIOProtocol, SmallReads):
    """One connection; takes uvicorn's arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._place: Place = self.app_state[PLACE]
        self._uploads: UploadRoom = self.app_state[UPLOADS]
        self._upload: IncomingUpload | None = None
        # Of a large message that the application has not taken.
        self._untaken: IncomingUpload | None = None
        self._stall = Alarm(self.loop, STALL_S, self._hang_up)

    def handle_connect(self, event: Request) -> None:
        """Accept or refuse a handshake."""
        super().handle_connect(event)
        if self.response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            problem = self.conn.handshake_exc
            what = problem.name if isinstance(problem, InvalidHeader) else type(problem).__name__
            limited(log).info("%d invalid WebSocket handshake: %s", self.response.status_code, what)

    async def send(self, message: "ASGISendEvent") -> None:
        """Send a message of the application."""
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # A refusal completes the handshake too; without this uvicorn logs an error of the application.
            self.handshake_complete = True

    def send_receive_event_to_app(self) -> None:
        """Pass a message to the application; text that is not UTF-8 closes the connection."""
        if self.curr_msg_data_type == "text" and not self.close_sent and not _is_text(self.frames):
            self.conn.fail(CloseCode.INVALID_DATA)
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()
            if self._upload is not None and self._upload.counted:
                self._upload.stop_timing()
                self._untaken, self._upload = self._upload, None
        self._end_upload()

    async def receive(self) -> "ASGIReceiveEvent":
        """Pass the next message to the application, which counts it from then on."""
        message = await super().receive()
        if self._untaken is not None:
            self._untaken.close()
            self._untaken = None
        return message

    def pause_writing(self) -> None:
        """Limit the time until the client reads."""
        super().pause_writing()
        self._stall.start()

    def resume_writing(self) -> None:
        """Lift that limit."""
        self._stall.stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the place."""
        self._stall.stop()
        self._end_upload()
        if self._untaken is not None:
            self._untaken.close()
            self._untaken = None
            self.queue.get_nowait()
        self._place.leave()
        super().connection_lost(exc)

    def keepalive_timeout(self) -> None:
        """End the connection, unless a message is processed: the client's answer is not read meanwhile."""
        if self.read_paused and self.ping_timeout is not None:
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
        else:
            super().keepalive_timeout()

    def data_received(self, data: bytes) -> None:
        """Process data, and limit the time for the rest of a message."""
        if self._upload is None:
            self._upload = self._uploads.open(self._place.holder, lambda _: self._hang_up())
        self._upload.grow(len(data))
        if self._upload.error is not None:
            return
        super().data_received(data)
        if len(self.frames) > MAX_FRAGMENTS:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG)
            self.handle_parser_exception()
        if not self.frames and not self.conn.reader.buffer:
            self._end_upload()

    def _end_upload(self) -> None:
        if self._upload is not None:
            self._upload.close()
            self._upload = None

    def _hang_up(self) -> None:
        self.transport.abort()


def _is_text(frames: list[bytes]) -> bool:
    # A character may be split between two frames.
    decoder = getincrementaldecoder("utf-8")()
    try:
        for at, frame in enumerate(frames, 1):
            decoder.decode(frame, at == len(frames))
    except UnicodeDecodeError:
        return False
    return True
