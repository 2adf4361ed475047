"""A stage's end of the control channel: heartbeats out, aborts in.

It has its own socket, so that aborts and heartbeats do not wait behind tensors: the gateway binds a
ROUTER, each stage connects DEALERs.
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
    """Connects a stage to the gateway's control socket, under a unique identity.

    Attributes:
        address: Where the gateway's control socket is.
        refused: Number of rejected messages, by error code.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str) -> None:
        self._decoder: Decoder[ControlToStage] = Decoder(ControlToStage, MAX_CONTROL_BYTES)
        self.address: Final = address
        self.refused: Counter[str] = Counter()
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.IDENTITY, identity.encode())
        self.socket.set(zmq.LINGER, LINGER_MS)
        self.socket.set(zmq.SNDHWM, 1000)
        # Nothing is queued for an absent gateway: it would be outdated when it starts.
        self.socket.set(zmq.IMMEDIATE, 1)
        self.socket.set(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        connect(self.socket, address, "gateway")

    def send(self, message: ControlToGateway) -> bool:
        """Send without blocking; False if no gateway is connected (a later heartbeat repeats the state)."""
        try:
            self.socket.send_multipart(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[ControlToStage]:
        """The messages that have arrived; never blocks."""
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
        """Count and log a message that was rejected, here or by the stage."""
        self.refused[error.code] += 1
        limited(log).warning("refused a control message: %s: %s", error.code, error)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
