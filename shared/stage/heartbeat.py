"""Heartbeats from their own thread, so that a long step does not look like a dead stage."""

import logging
import threading
import time
from contextlib import closing

import msgspec
import zmq

from shared.messages import HEARTBEAT_SUFFIX, Heartbeat, Peers
from shared.transport.control import ControlClient

log = logging.getLogger(__name__)


class HeartbeatThread(threading.Thread):
    """Repeats the loop's last report with the time since then, from the first report on.

    The heartbeats show that the process lives; their ``busy_s`` shows how long the loop has been in one step.

    Peers are left out while the gateway knows them. It tells all addresses if it misses some.

    Attributes:
        interval_s: Time between two heartbeats now: the gateway may ask for fewer than configured.
        sent: Heartbeats that were sent.
        late: Heartbeats more than an interval late, because the thread was not scheduled.
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
        self._least_interval_s = self.interval_s = interval_s
        self._told: list[str] | None = None
        self._report: tuple[Heartbeat, float] | None = None
        # Not _stop: join() calls Thread's method of that name.
        self._stopping = threading.Event()
        self._due = threading.Event()

    def note(self, heartbeat: Heartbeat, at_once: bool = False) -> None:
        """Take the loop's report; with ``at_once`` it is sent immediately."""
        self._report = (heartbeat, time.monotonic())
        if at_once:
            self._due.set()

    def answered(self, message: Peers) -> None:
        """Take the gateway's answer to a heartbeat."""
        self.interval_s = max(self._least_interval_s, message.heartbeat_s)
        if message.replicas is not None:
            self._told = None

    @property
    def report(self) -> Heartbeat | None:
        """The loop's last report, with the time since then; None before the first."""
        return None if self._report is None else aged(*self._report)

    def stop(self) -> None:
        """End the thread and wait for it, so that its socket is closed."""
        self._stopping.set()
        self._due.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Send until :meth:`stop`."""
        previous = time.monotonic()
        with closing(ControlClient(self._context, self._address, self._identity)) as client:
            while True:
                self._due.wait(self.interval_s)
                self._due.clear()
                if self._stopping.is_set():
                    return
                now = time.monotonic()
                if (report := self.report) is not None:
                    self.late += now - previous > 2 * self.interval_s
                    self.sent += self._send(client, report)
                previous = now

    def _send(self, client: ControlClient, report: Heartbeat) -> bool:
        told, self._told = self._told, report.peers
        if told == report.peers:
            report = msgspec.structs.replace(report, peers=None)
        sent = client.send(report)
        if not sent:
            self._told = None
        return sent


def aged(heartbeat: Heartbeat, since: float) -> Heartbeat:
    """A report of a moment, in monotonic seconds, with the time since then."""
    return msgspec.structs.replace(heartbeat, busy_s=time.monotonic() - since)
