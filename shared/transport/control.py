"""A stage's end of the control channel: heartbeats out, aborts in.

Aborts and heartbeats must not queue behind tensors, so they have a socket of their own: the gateway
binds a ROUTER, each stage connects a DEALER.
"""

import logging
from collections import Counter
from typing import Final

import zmq

from omnirelay.errors import MessageError
from shared.log import limited
from shared.messages import ControlToGateway, ControlToStage
from shared.transport.sockets import LINGER_MS, connect
from shared.transport.wire import Decoder, encode

MAX_CONTROL_BYTES: Final = 1 << 20
log = logging.getLogger(__name__)


class ControlClient:
    """Connects a stage to the gateway's control socket.

    Args:
        context: ZeroMQ context of the process.
        address: The gateway's control address.
        identity: The stage's name on that socket, unique among its peers.

    Attributes:
        refused: Messages that were refused, by error code.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str) -> None:
        self._decoder: Decoder[ControlToStage] = Decoder(ControlToStage, MAX_CONTROL_BYTES)
        self.refused: Counter[str] = Counter()
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.IDENTITY, identity.encode())
        self.socket.set(zmq.LINGER, LINGER_MS)
        self.socket.set(zmq.SNDHWM, 1000)
        # Nothing is kept for a gateway that is not there: it would hear of the past when it starts.
        self.socket.set(zmq.IMMEDIATE, 1)
        self.socket.set(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        connect(self.socket, address, "gateway")

    def send(self, message: ControlToGateway) -> bool:
        """Send without waiting.

        Returns:
            False if no gateway takes messages now; a later heartbeat will tell it the same.
        """
        try:
            self.socket.send_multipart(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[ControlToStage]:
        """Give what the gateway has sent, without waiting."""
        messages: list[ControlToStage] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._decoder.decode(frames))
            except MessageError as error:
                self.refuse(error)

    def refuse(self, error: MessageError) -> None:
        """Count and log a message that is refused, here or by the stage that looked closer."""
        self.refused[error.code] += 1
        limited(log).warning("refused a control message: %s: %s", error.code, error)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
