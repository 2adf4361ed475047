"""Heartbeats from a thread of their own, so that a long step does not look like a dead stage."""

import logging
import threading
import time

import msgspec
import zmq

from shared.control import ControlClient
from shared.messages import HEARTBEAT_SUFFIX, Heartbeat, StageName

log = logging.getLogger(__name__)


class HeartbeatThread(threading.Thread):
    """Repeats the loop's last report of itself, with the time that has passed since.

    A step may last: a long prompt, a long waveform.  The gateway learns from each heartbeat that the
    process lives, and from its ``busy_s`` how long the loop has been in the same step.

    Args:
        context: ZeroMQ context of the process; the thread makes a socket of its own.
        address: The gateway's control address.
        stage: The stage.
        interval_s: Time between two heartbeats.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, stage: StageName, interval_s: float
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._context = context
        self._address = address
        self._stage = stage
        self._interval_s = interval_s
        self._report: tuple[Heartbeat, float] | None = None
        # Not _stop: that is a method of Thread, which join() calls.
        self._stopping = threading.Event()

    def note(self, heartbeat: Heartbeat) -> None:
        """Take the loop's report of itself: it has just come round."""
        self._report = (heartbeat, time.monotonic())

    def stop(self) -> None:
        """End the thread and wait for it, so that its socket is closed."""
        self._stopping.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Send until :meth:`stop`."""
        client = ControlClient(self._context, self._address, f"{self._stage}{HEARTBEAT_SUFFIX}")
        try:
            while not self._stopping.wait(self._interval_s):
                if self._report is not None:
                    heartbeat, since = self._report
                    busy_s = time.monotonic() - since
                    client.send(msgspec.structs.replace(heartbeat, busy_s=busy_s))
        finally:
            client.close()
