"""Heartbeats from a thread of their own, so that a long step does not look like a dead stage."""

import logging
import threading
import time

import msgspec
import zmq

from shared.messages import HEARTBEAT_SUFFIX, Heartbeat
from shared.transport.control import ControlClient

log = logging.getLogger(__name__)


class HeartbeatThread(threading.Thread):
    """Repeats the loop's last report of itself, with the time that has passed since.

    A step may last: a long prompt, a long waveform.  The gateway learns from each heartbeat that the
    process lives, and from its ``busy_s`` how long the loop has been in the same step.

    Started before the loop reports for the first time, it waits for that.

    Args:
        context: ZeroMQ context of the process; the thread makes a socket of its own.
        address: The gateway's control address.
        identity: What the replica goes by on that socket.
        interval_s: Time between two heartbeats.

    Attributes:
        sent: Heartbeats that the gateway's socket took.
        late: Times that the thread came round more than an interval late: it did not get to run.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str, interval_s: float
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.sent = 0
        self.late = 0
        self._context = context
        self._address = address
        self._identity = f"{identity}{HEARTBEAT_SUFFIX}"
        self._interval_s = interval_s
        self._report: tuple[Heartbeat, float] | None = None
        # Not _stop: that is a method of Thread, which join() calls.
        self._stopping = threading.Event()
        self._due = threading.Event()

    def note(self, heartbeat: Heartbeat, at_once: bool = False) -> None:
        """Take the loop's report of itself: it has just come round.

        Args:
            heartbeat: The report.
            at_once: The gateway waits for what is new in it.
        """
        self._report = (heartbeat, time.monotonic())
        if at_once:
            self._due.set()

    @property
    def report(self) -> Heartbeat | None:
        """The loop's last report, with the time that has passed since; none before the first."""
        if self._report is None:
            return None
        heartbeat, since = self._report
        return msgspec.structs.replace(heartbeat, busy_s=time.monotonic() - since)

    def stop(self) -> None:
        """End the thread and wait for it, so that its socket is closed."""
        self._stopping.set()
        self._due.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Send until :meth:`stop`."""
        client = ControlClient(self._context, self._address, self._identity)
        previous = time.monotonic()
        try:
            while True:
                self._due.wait(self._interval_s)
                self._due.clear()
                if self._stopping.is_set():
                    return
                now = time.monotonic()
                report = self.report
                if report is not None:
                    self.late += now - previous > 2 * self._interval_s
                    self.sent += client.send(report)
                previous = now
        finally:
            client.close()
