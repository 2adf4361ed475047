"""uvicorn's WebSockets with bounds on what a client may hold."""

from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gateway.http.protocol import STALL_S, Alarm

MAX_MESSAGE_BYTES: Final = 16 * 2**20
"""Of one message; more closes the connection."""


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """One connection, hung up on if it reads nothing of what waits for it.  The arguments are uvicorn's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall = Alarm(self.loop, STALL_S, self._hang_up)

    def pause_writing(self) -> None:
        """Wait for the client to read, for some time."""
        super().pause_writing()
        self._stall.start()

    def resume_writing(self) -> None:
        """Go on: the client reads."""
        self._stall.stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stall.stop()
        super().connection_lost(exc)

    def _hang_up(self) -> None:
        self.transport.abort()
