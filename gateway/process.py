"""The gateway process: its parts, start and stop."""

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
import time
from typing import TYPE_CHECKING, Final

from gateway.access.access import Access
from gateway.access.listening import tell_shortage
from gateway.dispatch.stage_transport import StageTransport
from gateway.fairness.uploads import UploadRoom
from gateway.http.context import HttpContext
from gateway.http.server import api_server, monitor_server
from gateway.input.prompt import PromptBuilder
from gateway.manager import Gateway
from gateway.requests.tracing import GatewayTraces
from gateway.tcp.server import TcpServer
from omnirelay.errors import OmniRelayError
from omnirelay.status import GatewayStatus, StatusReport
from omnirelay.version import version
from shared.checkpoints import TOKENIZER_FILES, resolve_model, served_name
from shared.config import Config
from shared.ending import STOP_SIGNALS, TOGETHER_S, limit_end
from shared.families import DESCRIPTIONS, Descriptions
from shared.log import limited
from shared.metrics import ProcessMetrics
from shared.real_time import set_realtime_priority
from shared.starters import has_random_weights, load_starters
from shared.tracing.setup import open_tracer

if TYPE_CHECKING:
    from gateway.input.fetch import Fetcher

TICK_S: Final = 0.1
AWAY_S: Final = 0.25
"""A tick that is later by this much shows that the process was suspended."""
GC_THRESHOLDS: Final = (20_000, 20, 50)
"""Python's own are 700, 10 and 10: with thousands of requests, ten times as much of the processor."""
log = logging.getLogger(__name__)


class GatewayProcess:
    """All parts of a gateway; raises CheckpointError, AddressInUseError or ConfigError."""

    def __init__(
        self, config: Config, fetch: "Fetcher | None" = None, families: Descriptions = DESCRIPTIONS
    ) -> None:
        self._started = self._ticked = time.monotonic()
        self.access: Final = Access(config)
        self._text_only = config.text_only
        self._prompts = PromptBuilder(resolve_model(config, TOKENIZER_FILES), families)
        if fetch is None and config.media.url_hosts:
            from gateway.input.fetch import Fetcher  # noqa: PLC0415 - loads an HTTP client

            fetch = Fetcher(config.media)
        self._tracer = open_tracer(config.tracing, "gateway")
        traces = GatewayTraces(self._tracer, served_name(config)) if self._tracer is not None else None
        self._transport = StageTransport(config)
        self.gateway: Final = Gateway(config, self._prompts, self._transport, fetch, traces)
        access = self.access.keys, self.access.ephemeral, self.access.tls
        for each in (*self._transport.collectors(), *access, ProcessMetrics("gateway")):
            if each is not None:
                self.gateway.metrics.registry.register(each)
        uploads = UploadRoom(config.gateway.limits.held_bytes)
        directory = self._prompts.directory
        context = self._context = HttpContext(
            self.gateway,
            config,
            self.status,
            uploads,
            self.access,
            served_name(config),
            starters=[each.text for each in load_starters(directory) if each.typed],
            random_weights=has_random_weights(directory),
        )
        self._server = TcpServer(self.gateway, config, self.status, uploads, self.access, context.parsing)
        http, monitor = config.gateway.http, config.gateway.monitor
        self._http = api_server(http, self._context) if http is not None else None
        self._monitor = monitor_server(monitor, self._context) if monitor is not None else None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to serve; AddressInUseError if an address is in use."""
        try:
            await self._server.start()
            for each in (self._http, self._monitor):
                if each is not None:
                    await each.start()
        except OmniRelayError:
            await self._close_servers()
            self._close()
            raise
        self._transport.start(self.gateway.on_event, self.gateway.monitor.on_control)
        self._ticked = time.monotonic()
        self._ticker = asyncio.create_task(self._tick())

    async def drain(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Stop listening, and wait up to ``grace_s`` for open requests, or until ``hurry`` is set."""
        self._server.stop_listening()
        if self._http is not None:
            self._http.stop_listening()
        self.gateway.drain(grace_s)
        log.info("stopping: %d open requests may finish within %g s", self.access.open_requests, grace_s)
        until = time.monotonic() + grace_s
        while self._answering and not hurry.is_set() and time.monotonic() < until:
            await asyncio.sleep(TICK_S)
        if self._answering:
            log.warning("%d unfinished requests are cancelled", self.access.open_requests)

    async def stop(self) -> None:
        """End all requests and close all sockets."""
        self.gateway.close()
        await self._close_servers()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        self._close()

    async def serve(self, stop: asyncio.Event) -> BaseException | None:
        """Wait for ``stop``, or until a part that must run as long as the process ends; return its error."""
        parts = self._ticker, *(each.serving for each in (self._http, self._monitor) if each is not None)
        waits = [asyncio.create_task(stop.wait()), *(each for each in parts if each is not None)]
        ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        waits[0].cancel()
        return next((error for each in ended if (error := each.exception()) is not None), None)

    def status(self) -> StatusReport:
        """The status of the stack."""
        return StatusReport(
            gateway=GatewayStatus(
                version=version(),
                pid=os.getpid(),
                uptime_s=time.monotonic() - self._started,
                peak_memory_bytes=peak_memory_bytes(),
                model=str(self._prompts.directory),
                text_only=self._text_only,
            ),
            stages=self.gateway.registry.report(),
            requests=self.gateway.counts.report(),
            refused=dict(self._transport.refused() + self._server.refused),
            dropped_events=self.gateway.dropped_events,
            resumes=self.gateway.dispatcher.resumes,
        )

    @property
    def _answering(self) -> bool:
        """An answer has not been sent completely."""
        return self.access.open_requests > 0 or (self._http is not None and self._http.answering)

    def _close(self) -> None:
        self._transport.close()
        if self._tracer is not None:
            self._tracer.close()

    async def _close_servers(self) -> None:
        calls = self._context.calls
        for each in calls:
            each.cancel()
        servers = (each.close() for each in (self._server, self._http, self._monitor) if each)
        await asyncio.gather(*servers, asyncio.gather(*calls, return_exceptions=True))
        self._context.audio.shutdown(wait=False, cancel_futures=True)
        self._context.parsing.close()

    async def _tick(self) -> None:
        works = (
            self._note_suspension,
            self._transport.poll,
            self.gateway.start_waiting,
            self.gateway.check_stages,
        )
        while True:
            await asyncio.sleep(TICK_S)
            for work in works:
                try:
                    work()
                except Exception:  # noqa: BLE001 - whatever one message or request causes, the others go on
                    limited(log).exception("the gateway's periodic work failed, and goes on")

    def _note_suspension(self) -> None:
        """While this process was suspended, no stage was silent."""
        now = time.monotonic()
        away_s, self._ticked = now - self._ticked - TICK_S, now
        if away_s > AWAY_S:
            told = "this gateway was suspended for %.1f s: timeouts of stages are extended by that"
            log.warning(told, away_s)
            self.gateway.registry.excuse(away_s)


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def limit_collections() -> None:
    """Let the garbage collector run less often, and leave out what is loaded: it stops all streams."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def run(config: Config, families: Descriptions = DESCRIPTIONS) -> None:
    """Run a gateway until SIGTERM or SIGINT and the end of its requests; a second signal ends them.

    Raises:
        Exception: What ended one of its parts; the gateway has stopped.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    stopped_at = 0.0

    def tell() -> None:
        nonlocal stopped_at
        if not stop.is_set():
            stopped_at = loop.time()
            stop.set()
        elif loop.time() - stopped_at > TOGETHER_S:
            hurry.set()

    loop.set_exception_handler(tell_shortage)
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, tell)
    process: GatewayProcess | None = None

    def reload() -> None:
        # None if the process could not be constructed.
        if process is not None:
            process.access.reload()

    loop.add_signal_handler(signal.SIGHUP, reload)
    process = GatewayProcess(config, families=families)
    await process.start()
    # Or stages on the same machine would delay it.
    set_realtime_priority()
    limit_collections()
    addresses = (config.gateway.listen, config.gateway.http, config.gateway.monitor)
    log.info("listening on %s", ", ".join(filter(None, addresses)))
    process.access.warn()
    failure = await process.serve(stop)
    if failure is not None:
        log.critical("a part of this gateway has ended: the process stops, so that it is started again")
    await process.drain(config.gateway.drain_s if failure is None else 0, hurry)
    limit_end()
    await process.stop()
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        loop.remove_signal_handler(number)
        # A late signal must not change the exit status.
        signal.signal(number, signal.SIG_IGN)
    if failure is not None:
        raise failure
