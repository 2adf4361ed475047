"""From the command line to a running stage."""

import argparse
import gc
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import zmq
from prometheus_client import REGISTRY

from omnirelay.errors import ConfigError, EngineFailedError, OmniRelayError
from shared.checkpoints import resolve_model
from shared.config import Config, GatewayAddresses, load_config, tell_ignored
from shared.ending import Start, limit_end, run_to_end
from shared.log import configure_logging, limited
from shared.messages import Farewell, StageName
from shared.metrics import ProcessMetrics
from shared.stage.discovery import GatewayFinder
from shared.stage.endpoint import HttpEndpoint, StageHealth
from shared.stage.gateways import GatewayLink, GatewayQueues, open_gateway, sending_of
from shared.stage.loop import StageLoop, stop_on_signals
from shared.stage.membership import Membership
from shared.stage.metrics import StageMetrics
from shared.stage.service import StageService
from shared.tracing.setup import open_tracer
from shared.transport.curve import PeerMetrics, StackContext, open_context
from shared.transport.metrics import EdgeMetrics
from shared.transport.queues import PullQueue
from shared.transport.routing import Outgoing, PeerQueues
from shared.vllm.environment import prepare_environment

if TYPE_CHECKING:
    from shared.tracing.otel import Tracer

Context = zmq.Context[zmq.Socket[bytes]]
Built = tuple[StageService[Any], PeerQueues[Any] | None]
"""A stage's service, and its queues to the next stage (None for the last)."""
Build = Callable[[Config, Path, Context, GatewayQueues], Built]
Check = Callable[[Path], object]
"""Raises :class:`omnirelay.errors.CheckpointError` if the checkpoint in a directory cannot be served."""

_MOST_NICE: Final = 19
"""Of setpriority(2)."""
_SESSION_NICENESS: Final = Path("/proc/self/autogroup")
"""Of sched(7)."""

log = logging.getLogger(__name__)


def run_stage(name: StageName, union: Any, build: Build, check: Check = lambda _: None) -> NoReturn:
    """Run one stage until SIGTERM; the body of ``python -m services.STAGE --config FILE``.

    The exit status is 0 after a stop signal, 1 with one line of explanation if the stage cannot start, and
    :attr:`omnirelay.errors.EngineFailedError.exit_status` if its engine failed.

    Args:
        union: The message types of its inbox.
        build: Creates its service; imports torch and vLLM only when called, after the environment is set.
        check: Called with the checkpoint's directory before anything is loaded.
    """
    run_to_end(lambda: _run(name, union, build, check))


def _run(name: StageName, union: Any, build: Build, check: Check) -> int:
    start = Start()
    parser = argparse.ArgumentParser(prog=f"python -m services.{name}")
    parser.add_argument("--config", type=Path, help="YAML file; without it, the built-in configuration")
    path: Path | None = parser.parse_args().config
    configure_logging(name, "info")
    finder = GatewayFinder(path)
    # Before the file is read, so that no change of it is missed.
    signal.signal(signal.SIGHUP, lambda *_: finder.reload())
    try:
        config = load_config(path)
        configure_logging(name, config.log_level, config.log_format)
        tell_ignored()
        with start.closing:
            _serve(start, name, config, finder, union, build, check)
    except EngineFailedError as error:
        log.error("%s: %s", error.code, error)
        return error.exit_status
    except OmniRelayError as error:
        log.error("%s: %s", error.code, error)
        return 1
    log.info("stopped")
    return 0


def lower_priority(niceness: int) -> None:
    """Lower the priority of this thread, the threads it starts from now on, and this process's session.

    Where Linux groups processes by session (``CONFIG_SCHED_AUTOGROUP``), thread niceness counts only within a
    session; so a session that is this process's own gets the same niceness.
    """
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(_MOST_NICE, now + niceness))
    if os.getsid(0) == os.getpid():
        try:
            _SESSION_NICENESS.write_text(str(niceness), encoding="ascii")
        except OSError as error:
            log.debug("cannot set the session's niceness: %s", error)


@dataclass(frozen=True)
class _Channels:
    """What a stage has before its model is loaded."""

    context: StackContext
    health: StageHealth
    inbox: PullQueue[Any]
    tracer: "Tracer | None"
    instance: str
    events: GatewayQueues
    follow: Callable[[], bool]


def _serve(
    start: Start,
    name: StageName,
    config: Config,
    finder: GatewayFinder,
    union: Any,
    build: Build,
    check: Check,
) -> None:
    model = resolve_model(config)
    check(model)
    prepare_environment(config.stage(name), len(config.served_stages))
    with start.making():
        channels = _open(start.closing, name, config, finder, union)
    # The threads of heartbeats and ZeroMQ exist by now and keep their priority; compute threads follow.
    lower_priority(config.stage(name).niceness)
    log.info("loading %s", model)
    service, peers = build(config, model, channels.context, channels.events)
    with start.making():
        loop = _prepare(start.closing, name, config, channels, service, peers)
        stop_on_signals(loop)
    log.info("%s is ready on %s", channels.instance, config.stage(name).advertise or channels.inbox.endpoint)
    channels.health.loaded(loop)
    loop.run()


def _open(
    closing: ExitStack, name: StageName, config: Config, finder: GatewayFinder, union: Any
) -> _Channels:
    """Open all sockets first: an address in use is reported before a model is loaded."""
    stage = config.stage(name)
    context = open_context(config, name)
    # Closes what a failure left open, too.
    closing.callback(context.destroy)
    health = StageHealth(config.gateway.step_timeout_s)
    inbox: PullQueue[Any] = PullQueue(context, stage.inbox, union, stage.max_payload_bytes)
    closing.callback(inbox.close)
    if stage.http is not None:
        closing.enter_context(HttpEndpoint(stage.http, health.why_not_live, health.why_not_ready))
    tracer = open_tracer(config.tracing, name)
    if tracer is not None:
        closing.callback(tracer.close)
    instance = secrets.token_hex(8)
    events = GatewayQueues(sending_of(config, name, instance))
    closing.callback(events.close)
    finder.begin(config.gateway)
    closing.callback(finder.stop)

    def connect(found: GatewayAddresses) -> GatewayLink:
        return open_gateway(context, found, config, name, instance)

    def follow() -> bool:
        try:
            return events.follow(finder.found, connect)
        except (ConfigError, zmq.ZMQError) as error:
            limited(log).error("cannot connect to a gateway: %s", error)
            return True

    # What is wrong with a configured address is told at once.
    events.follow(finder.found, connect)
    return _Channels(context, health, inbox, tracer, instance, events, follow)


def _prepare(
    closing: ExitStack,
    name: StageName,
    config: Config,
    channels: _Channels,
    service: StageService[Any],
    peers: PeerQueues[Any] | None,
) -> StageLoop[Any]:
    """Assemble the loop around what was loaded."""
    stage, instance = config.stage(name), channels.instance
    outboxes: dict[str, Outgoing] = {"gateway": channels.events}
    if peers is not None:
        outboxes[peers.stage] = peers
        closing.callback(peers.close)
    closing.callback(service.close)
    closing.callback(channels.events.say_farewell, Farewell(stage=name, instance=instance))
    closing.callback(channels.health.ended)
    closing.callback(limit_end)
    service.traces.tracer = channels.tracer
    address = stage.advertise or channels.inbox.endpoint
    membership = Membership(name, instance, address, channels.events, peers)
    # What was loaded stays until the end; garbage collection can skip it.
    gc.freeze()
    loop = StageLoop(
        service, stage, channels.inbox, membership, channels.events, list(outboxes.values()), channels.follow
    )
    edges = EdgeMetrics(name, outboxes, channels.inbox, channels.events.refused)
    for metrics in (
        StageMetrics(service, loop, membership),
        edges,
        PeerMetrics(channels.context),
        ProcessMetrics(name),
    ):
        REGISTRY.register(metrics)
    return loop
