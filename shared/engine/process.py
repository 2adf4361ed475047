"""From the command line to a running stage loop."""

import argparse
import gc
import logging
import multiprocessing
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import zmq
from prometheus_client import REGISTRY

from shared.checkpoints import resolve_model
from shared.config import Config, load_config
from shared.control import ControlClient
from shared.curve import PeerMetrics, open_context
from shared.engine.endpoint import HttpEndpoint
from shared.engine.environment import prepare_environment
from shared.engine.health import StageHealth
from shared.engine.heartbeat import HeartbeatThread
from shared.engine.membership import Membership
from shared.engine.metrics import StageMetrics
from shared.engine.service import StageService
from shared.engine.stage import StageLoop, stop_on_signals
from shared.errors import OmniRelayError
from shared.log import configure_logging
from shared.messages import Farewell, StageEvent, StageName, control_identity
from shared.metrics import EdgeMetrics
from shared.model_files import require_model_files
from shared.peers import Outgoing, PeerQueues
from shared.queues import PullQueue, PushQueue, Sending
from shared.tracing import open_tracer

Context = zmq.Context[zmq.Socket[bytes]]
Build = Callable[
    [Config, Path, Context, PushQueue[StageEvent]], tuple[StageService[Any], PeerQueues[Any] | None]
]
"""Makes the stage's service, and its queues to the next stage; none for the last."""

_MOST_NICE: Final = 19
"""Of setpriority(2)."""
_SESSION_NICENESS: Final = Path("/proc/self/autogroup")
"""Of sched(7)."""

log = logging.getLogger(__name__)


def run_stage(name: StageName, union: Any, build: Build) -> None:
    """Run one stage until SIGTERM; the body of ``python -m services.STAGE --config FILE``.

    Exits with 0 after a clean stop, with 1 and one line of explanation if the stage cannot start.

    Args:
        name: The stage.
        union: The messages that its inbox takes.
        build: Makes its service; imports torch and vLLM only when called, since the environment must
            be prepared before.
    """
    parser = argparse.ArgumentParser(prog=f"python -m services.{name}")
    parser.add_argument("--config", type=Path, help="YAML file; without it, the built-in configuration")
    path: Path | None = parser.parse_args().config
    try:
        config = load_config(path)
        configure_logging(name, config.log_level)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        signal.signal(signal.SIGHUP, _stay)
        _serve(name, config, union, build)
    except OmniRelayError as error:
        log.error("%s: %s", error.code, error)
        sys.exit(1)
    if not multiprocessing.active_children():
        # Taking down torch and vLLM piece by piece lasts seconds, and nothing depends on it any more:
        # the sockets are closed and all is sent.  Only workers in further processes need an orderly end.
        logging.shutdown()
        os._exit(0)


def _leave(number: int, _: Any) -> None:
    """End while nothing has begun yet."""
    signal.signal(number, signal.SIG_DFL)
    log.info("%s: stopped while loading", signal.Signals(number).name)
    sys.exit(0)


def _stay(_number: int, _: Any) -> None:
    log.info("SIGHUP: a stage reads nothing again; restart it after a change of its configuration")


def be_nice(niceness: int) -> None:
    """Lower the priority of this thread, of those it starts from now on, and of this process among others.

    Where Linux groups processes by session (``CONFIG_SCHED_AUTOGROUP``), the niceness of threads counts only
    within their session; so one that is this process's own is made as nice.
    """
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(_MOST_NICE, now + niceness))
    if os.getsid(0) == os.getpid():
        try:
            _SESSION_NICENESS.write_text(str(niceness), encoding="ascii")
        except OSError as error:
            log.debug("no niceness for the session: %s", error)


def _serve(name: StageName, config: Config, union: Any, build: Build) -> None:
    stage = config.stage(name)
    model = resolve_model(config)
    require_model_files(model)
    prepare_environment(stage)
    context = open_context(config, name)
    health = StageHealth(config.gateway.step_timeout_s)
    with ExitStack() as closing:
        # The addresses first: if one is taken, say so before a model is loaded.
        inbox: PullQueue[Any] = PullQueue(context, stage.inbox, union, stage.max_payload_bytes)
        if stage.http is not None:
            closing.enter_context(HttpEndpoint(stage.http, health.why_not_live, health.why_not_ready))
        tracer = open_tracer(config.tracing, name)
        if tracer is not None:
            closing.callback(tracer.close)
        instance = secrets.token_hex(8)
        identity = control_identity(name, instance)
        address = stage.advertise or inbox.endpoint
        control = ControlClient(context, config.gateway.control, identity)
        sending = Sending(identity, config.window_bytes, stage.max_backlog_bytes)
        gateway: PushQueue[StageEvent] = PushQueue(context, config.gateway.events, sending, "gateway")
        heart = HeartbeatThread(context, config.gateway.control, identity, stage.heartbeat_s)
        heart.start()
        closing.callback(heart.stop)
        # It and ZeroMQ's own threads are there by now and keep their priority; those that compute are yet to
        # come.
        be_nice(stage.niceness)
        log.info("loading %s", model)
        service, peers = build(config, model, context, gateway)
        service.traces.tracer = tracer
        outboxes: dict[str, Outgoing] = {"gateway": gateway}
        if peers is not None:
            outboxes[peers.stage] = peers
        membership = Membership(name, instance, address, peers, config.gateway.orphan_timeout_s)
        # What was loaded stays until the end: no garbage collection needs to look at it again.
        gc.freeze()
        loop = StageLoop(service, stage, inbox, membership, control, heart, gateway, list(outboxes.values()))
        edges = EdgeMetrics(name, outboxes, {name: inbox}, {"control": control.refused})
        for metrics in (StageMetrics(service, loop, heart), edges, PeerMetrics(context)):
            REGISTRY.register(metrics)
        stop_on_signals(loop)
        log.info("%s is ready on %s", instance, address)
        health.loaded(heart)
        try:
            loop.run()
        finally:
            health.ended()
            # No heartbeat may come after the farewell.
            heart.stop()
            control.send(Farewell(stage=name, instance=instance))
            service.close()
            inbox.close()
            control.close()
            for outbox in outboxes.values():
                outbox.close()
            context.term()
    log.info("stopped")
