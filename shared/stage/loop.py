"""A stage is one process and one loop: drain the inbox, step, send the results, block only when idle."""

import logging
import os
import resource
import signal
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec
import zmq

from omnirelay.errors import (
    EngineFailedError,
    MessageError,
    OmniRelayError,
    PoisonRequestError,
    QueueFullError,
    RepeatedMessageError,
    RequestError,
    StageFailedError,
    StageUnavailableError,
)
from shared.config import StageConfig
from shared.ending import STOP_SIGNALS, TOGETHER_S, end_process
from shared.log import of_request
from shared.messages import (
    Abort,
    AbortDone,
    ControlToStage,
    Credit,
    Heartbeat,
    Peers,
    RequestFailed,
    StageEvent,
)
from shared.metrics import Distribution
from shared.stage.gateways import GatewayLink
from shared.stage.heartbeat import aged
from shared.stage.membership import Membership
from shared.stage.service import StageService
from shared.transport.credits import MARK_AGAIN_S
from shared.transport.queues import PullQueue
from shared.transport.routing import Outgoing, Outlet

REMEMBERED_ENDS: Final = 10_000
"""Aborted and failed requests whose late messages are ignored; older ones count as unknown."""
ACTIVITIES: Final = ("wait", "take", "model", "engine", "send")
"""See :attr:`StageLoop.seconds`."""
DropReason = Literal["aborted", "orphaned"]
STEP_BUCKETS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Seconds of a step."""

M = TypeVar("M")
log = logging.getLogger(__name__)


class StageLoop(Generic[M]):
    """Runs a service until it is told to stop.

    Args:
        outboxes: All queues to others, that of the events included.
        follow: Connects to gateways at new addresses; whether there are others than before.

    Attributes:
        failures: Requests that failed here, by error code.
        drops: Requests that were dropped before their end, by reason.
        step_seconds: Duration of each step, sending included.
        seconds: The loop's time by activity: ``wait`` for work; ``take`` messages; compute the ``model``; the
            ``engine`` around it (schedule, prepare, sample); ``send``.
    """

    def __init__(
        self,
        service: StageService[M],
        config: StageConfig,
        inbox: PullQueue[M],
        membership: Membership,
        events: Outlet[StageEvent],
        outboxes: Sequence[Outgoing],
        follow: Callable[[], bool] = lambda: False,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self.step_seconds = Distribution(STEP_BUCKETS)
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)
        # When the last activity ended, and the model's and the outboxes' clocks at that time.
        self._lap = (0.0, 0.0, 0.0)
        self._service = service
        self._inbox = inbox
        self._membership = membership
        self._follow = follow
        self._events = events
        self._outboxes = outboxes
        self._drain_s = config.drain_s
        self._report_s = config.heartbeat_s / 2
        self._next_report = 0.0
        self._told: object = None
        # The only request of the next step, see :meth:`shared.stage.service.StageService.take_turn`.
        self._alone: str | None = None
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._stopping = False
        self._last_report: tuple[Heartbeat, float] | None = None
        self._poller = self._make_poller()

    @property
    def report(self) -> Heartbeat | None:
        """What it reported last, with the time since then; None before that.  Any thread may read it."""
        return None if self._last_report is None else aged(*self._last_report)

    def stop(self) -> None:
        """End the loop after the current step; safe to call from a signal handler."""
        self._stopping = True

    def drain(self) -> None:
        """End when no request needs the stage, or after ``drain_s``; safe to call from a signal handler."""
        self._membership.drain(self._drain_s)

    def run(self) -> None:
        """Run until :meth:`stop`, or the end of :meth:`drain`.

        Raises:
            EngineFailedError: The engine raised; every active request has been reported failed.
        """
        sent = sum(outbox.busy_s for outbox in self._outboxes)
        self._lap = time.perf_counter(), self._service.model_time.seconds, sent
        try:
            while not self._stopping:
                self._wait()
                self._spent("wait")
                self._take_control()
                self._take_inbox()
                self._spent("take")
                if self._may_step():
                    self._step()
                    self._spent("engine")
                for outbox in self._outboxes:
                    outbox.flush()
                self._report()
                self._spent("send")
                if self._membership.may_end():
                    return
        except Exception as error:
            log.exception("the engine failed; this stage ends")
            reason = EngineFailedError(f"the {self._service.name}'s engine failed: {error!r}")
            # The engine is broken and not called again.  Requests that were not in the step are not to blame:
            # they resume when this replica has left.
            for request_id in [self._alone] if self._alone else self._service.active_requests():
                self._tell_failure(request_id, PoisonRequestError(str(reason)) if self._alone else reason)
            raise reason from error

    def _spent(self, activity: str) -> None:
        """Count the time since the last call, apart from the model's and the outboxes' share of it."""
        now, model, sending = time.perf_counter(), self._service.model_time.seconds, 0.0
        for outbox in self._outboxes:
            sending += outbox.busy_s
        then, model_then, sending_then = self._lap
        self._lap = now, model, sending
        seconds = self.seconds
        seconds["model"] += (computed := model - model_then)
        seconds["send"] += (sent := sending - sending_then)
        seconds[activity] += now - then - computed - sent

    def _may_step(self) -> bool:
        """Whether there is something to compute, and the gateway knows what is computed alone."""
        self._alone = self._service.take_turn()
        return self._service.ready and self._membership.knows(self._alone)

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        for gateway in self._membership.gateways:
            poller.register(gateway.control.socket, zmq.POLLIN)
        if self._service.wake_fd is not None:
            poller.register(self._service.wake_fd, zmq.POLLIN)
        return poller

    def _wait(self) -> None:
        """Block if there is nothing to compute, until a message, credit, room in ZeroMQ, or `wake_at`."""
        if self._may_step():
            return
        until = min(self._next_report, self._service.wake_at)
        wait_s = max(0.0, until - time.monotonic())
        if any(outbox.backlog_bytes for outbox in self._outboxes):
            wait_s = min(wait_s, MARK_AGAIN_S)
        refusing = [socket for outbox in self._outboxes for socket in outbox.refusing]
        for socket in refusing:
            self._poller.register(socket, zmq.POLLOUT)
        woken = self._poller.poll(int(wait_s * 1000) + 1)
        for socket in refusing:
            self._poller.unregister(socket)
        wake_fd = self._service.wake_fd
        if wake_fd is not None and (wake_fd, zmq.POLLIN) in woken:
            os.eventfd_read(wake_fd)

    def _take_control(self) -> None:
        for gateway in self._membership.gateways:
            for message in gateway.control.receive():
                self._take_order(gateway, message)
            if gateway.abandoned:
                # Reported, since a gateway that was only slow must learn that they are gone.
                silent = StageUnavailableError("the gateway was silent for too long")
                for request_id in filter(gateway.owns, self._service.active_requests()):
                    self._drop(request_id, "orphaned")
                    self._fail(request_id, silent)
                self._membership.leave(gateway)

    def _take_order(self, gateway: GatewayLink, message: ControlToStage) -> None:
        if isinstance(message, Abort):
            self._abort(gateway, message.request_id)
        elif isinstance(message, Peers):
            if self._membership.hear(gateway, message):
                self._drop_orphans()
        elif isinstance(message, Credit):
            self._take_credit(gateway, message)
        else:
            self._membership.leave(gateway)
            self._drop_orphans()

    def _abort(self, gateway: GatewayLink, request_id: str) -> None:
        if self._membership.owner(request_id) not in (gateway, None):
            gateway.control.refuse(MessageError(f"{request_id} is a request of another gateway"))
            return
        self._drop(request_id, "aborted")
        # The next report is without it.
        self._next_report = 0.0
        done = AbortDone(request_id=request_id, stage=self._service.name, instance=self._membership.instance)
        gateway.control.send(done)

    def _take_credit(self, gateway: GatewayLink, credit: Credit) -> None:
        try:
            known = any(outbox.credit(credit) for outbox in self._outboxes)
        except MessageError as error:
            gateway.control.refuse(error)
        else:
            if not known:
                log.debug("credit for the channel %s, which was closed", credit.channel)

    def _drop_orphans(self) -> None:
        """Drop the requests whose gateway is gone."""
        for request_id in self._service.active_requests():
            if self._membership.owner(request_id) is None:
                log.info("request %s is an orphan", request_id, extra=of_request(request_id))
                self._drop(request_id, "orphaned")

    def _drop(self, request_id: str, why: DropReason) -> None:
        """Drop all state of a request."""
        if self._service.holds(request_id):
            self.drops[why] += 1
        self._service.traces.aborted(request_id)
        self._end(request_id)
        for outbox in self._outboxes:
            outbox.discard(request_id)

    def _take_inbox(self) -> None:
        for message in self._inbox.drain():
            request_id: str = message.request_id  # type: ignore[attr-defined]  # every message has one
            if request_id in self._ended:
                continue
            route = getattr(message, "route", None)
            if not self._membership.concerns(request_id, route):
                # Nor are its later messages for this process.
                self._end(request_id)
                continue
            self._take(request_id, message)
        for credit in self._inbox.take_credits():
            # Any gateway passes it on, unless it is for that gateway.  If it is lost, the sender asks again.
            for gateway in self._membership.gateways:
                gateway.control.send(credit)

    def _take(self, request_id: str, message: M) -> None:
        try:
            self._service.accept(message)
        except MessageError as error:
            self._inbox.refuse(error)
            if self._service.holds(request_id) and not isinstance(error, RepeatedMessageError):
                self._fail(request_id, StageFailedError(f"{error.code}: {error}"))
        except (RequestError, QueueFullError) as error:
            self._fail(request_id, error)
        except Exception as error:
            # Nothing was computed yet, so only this request is affected.
            about = of_request(request_id)
            log.exception("a message of request %s could not be taken", request_id, extra=about)
            self._fail(request_id, StageFailedError(f"a message could not be taken: {error!r}"))

    def _step(self) -> None:
        started = time.perf_counter()
        failures = self._service.step()
        self.step_seconds.observe(time.perf_counter() - started)
        for request_id, reason in failures.items():
            self._fail(request_id, reason)

    def _fail(self, request_id: str, error: OmniRelayError) -> None:
        """Drop a request and report the error to the gateway."""
        log.warning("request %s failed: %s", request_id, error.for_log, extra=of_request(request_id))
        self._end(request_id)
        self._tell_failure(request_id, error)

    def _tell_failure(self, request_id: str, error: OmniRelayError) -> None:
        self.failures[error.code] += 1
        self._service.traces.failed(request_id, error.code)
        message = RequestFailed(
            request_id=request_id, stage=self._service.name, code=error.code, message=str(error)[:4096]
        )
        try:
            self._events.put(message)
        except QueueFullError as full:
            log.error("cannot report it, its deadline will end it: %s", full)

    def _end(self, request_id: str) -> None:
        """Drop a request, and ignore what its sender sends until it learns of the end."""
        self._ended[request_id] = None
        if len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        self._service.abort(request_id)

    def _report(self) -> None:
        """Pass a report to the heartbeat threads, periodically and when something changed."""
        self._alone = self._service.take_turn()
        now = time.monotonic()
        links = self._links()
        told = links, self._alone
        news = self._membership.news or told != self._told
        if now < self._next_report and not news:
            return
        self._membership.news, self._told = False, told
        self._next_report = now + self._report_s
        if self._follow():
            self._poller = self._make_poller()
        load = msgspec.structs.replace(
            self._service.load(),
            outbox_bytes=sum(outbox.backlog_bytes for outbox in self._outboxes),
            refused=self._inbox.refused.total() + self._membership.queues.refused.total(),
        )
        report = Heartbeat(
            stage=self._service.name,
            pid=os.getpid(),
            instance=self._membership.instance,
            inbox=self._membership.inbox,
            limits=self._service.limits,
            load=load,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            peers=links[0],
            draining=self._membership.draining,
            breaks=links[1],
            alone=self._alone,
        )
        self._last_report = report, now
        for gateway in self._membership.gateways:
            gateway.report(report, at_once=news)

    def _links(self) -> tuple[list[str], dict[str, int], list[int]]:
        """The present connections to the next stage, and how often each, and those to gateways, were lost."""
        lost = [gateway.events.link.breaks for gateway in self._membership.gateways]
        return self._membership.peers, self._membership.breaks, lost


def stop_on_signals(loop: StageLoop[Any]) -> None:
    """Let SIGTERM and SIGINT drain the loop; a second one ends the process."""

    stopped_at = 0.0

    def drain(number: int, _: Any) -> None:
        nonlocal stopped_at
        stopped_at = time.monotonic()
        for each in STOP_SIGNALS:
            signal.signal(each, leave)
        log.info("%s: stopping", signal.Signals(number).name)
        loop.drain()

    def leave(number: int, _: Any) -> None:
        if time.monotonic() - stopped_at <= TOGETHER_S:
            return
        try:
            log.info("%s again: open requests are dropped", signal.Signals(number).name)
        finally:
            end_process(0)

    for number in STOP_SIGNALS:
        signal.signal(number, drain)
