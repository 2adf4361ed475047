"""The processes of the stack on one machine: started together, watched, stopped together."""

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from omnirelay import StatusReport
from omnirelay.cli.progress import ProgressLine
from omnirelay.errors import (
    ConfigError,
    EngineFailedError,
    GatewayUnreachableError,
    MessageError,
    StageStartError,
)
from ops.addresses import require_free
from ops.child import Child
from ops.console import announce, console
from ops.replicas import own_addresses
from ops.target import probe_target
from shared.config import ENV_PREFIX, Config
from shared.ending import TOGETHER_S
from shared.messages import STAGES

STOP_S: Final = 8.0
"""Time for the processes to stop by themselves once no request is left; then they are killed."""
FAREWELL_S: Final = 3.0
"""Time for the gateway to report aborted requests to their clients."""
MOST_RESTARTS: Final = 5
RESTARTS_WITHIN_S: Final = 60.0
"""Limit of restarts of stages that end before they are ready."""
POLL_S: Final = 0.2
PROGRESS_S: Final = 5.0
MODULES: Final = {"gateway": "gateway"} | {stage: f"services.{stage}" for stage in STAGES}
"""What each process runs, ``python -m MODULE``."""


class Stack:
    """The gateways and the replicas of the stages.

    Args:
        config: Their configuration.
        config_path: Its file, which each process reads; None for the defaults.
        show: Called with the name of a process and a line of its output.
        modules: What each process runs.

    Raises:
        ConfigError: The file cannot be read repeatedly, as a pipe.
    """

    def __init__(
        self,
        config: Config,
        config_path: Path | None,
        show: Callable[[str, str], None] | None = None,
        modules: Mapping[str, str] = MODULES,
    ) -> None:
        if config_path is not None and not config_path.is_file():
            raise ConfigError(
                f"the configuration {config_path} is no regular file, but every process and every restart "
                "reads it: write it to a file first"
            )
        self._config = config
        self._modules = modules
        self._arguments = ["--config", str(config_path)] if config_path else []
        self._show = show or console.show
        self._children: list[Child] = []
        self._hurry = asyncio.Event()
        # Each child's own environment variables, and the times of restarts.
        self._changes: dict[str, dict[str, str]] = {}
        self._restarts: list[float] = []

    async def start(self) -> StatusReport:
        """Start all processes and wait until they are ready.

        Returns:
            Their status.

        Raises:
            AddressInUseError: Another process listens at one of their addresses.
            StageStartError: One ended; the message says which, and its last lines.
        """
        require_free(self._config)
        for name in self._modules:
            if name != "gateway" and name not in self._config.served_stages:
                continue
            for number in range(1, self._replicas(name) + 1):
                child = f"{name} {number}" if number > 1 else name
                self._changes[child] = self._own(name, number) if number > 1 else {}
                self._children.append(await self._launch(child))
        return await self._wait_until_ready()

    async def watch(self) -> None:
        """Restart processes that fail, and gateways told to end while another serves; not others told to end.

        Gateways resume the requests of stages, and clients those of gateways.

        Raises:
            StageStartError: The only gateway ended, or processes repeatedly end; the message has the last
                lines.
        """
        while True:
            ends = [asyncio.create_task(child.wait()) for child in self._children]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
            for index, child in enumerate(list(self._children)):
                if not child.alive:
                    await self._check_restart(child)
                    if child.status == 0 and not self._is_replaced(child):
                        announce(f"the {child.name} {child.ending}")
                        self._children.remove(child)
                    else:
                        announce(f"the {child.name} {child.ending}: it is started again")
                        self._children[index] = await self._launch(child.name)
                    break

    async def _check_restart(self, child: Child) -> None:
        gateways = self._gateways()
        if self._is_replaced(child) or (child not in gateways and await self._could_serve(child)):
            # The cause came from outside, a request or an operator, and must not end the stack.
            return
        now = time.monotonic()
        recent = [each for each in self._restarts if now - each < RESTARTS_WITHIN_S]
        if len(recent) >= MOST_RESTARTS or gateways == [child]:
            self._check_alive("while the stack was running")
        self._restarts = [*recent, now]

    def _is_replaced(self, child: Child) -> bool:
        """Whether it is a gateway that was told to end while another one serves."""
        gateways = self._gateways()
        others = [each for each in gateways if each is not child]
        return child in gateways and child.status == 0 and any(each.alive for each in others)

    async def _could_serve(self, child: Child) -> bool:
        """Whether a stage that has ended had loaded its model.

        Its exit status says so if it was told to end or its engine failed; otherwise the gateways still
        list it from its heartbeats.
        """
        if child.status in (0, EngineFailedError.exit_status):
            return True
        reports = await self._ask()
        return any(stage.pid == child.pid for report in reports.values() if report for stage in report.stages)

    async def _launch(self, child: str) -> Child:
        module = self._modules[child.partition(" ")[0]]
        command = [sys.executable, "-m", module, *self._arguments]
        # All processes are on this machine, so stages on one GPU divide it.
        common = {f"{ENV_PREFIX}SHARE_GPUS": "true"}
        if self._config.text_only:
            # From the command line: it is in no file.
            common[f"{ENV_PREFIX}TEXT_ONLY"] = "true"
        return await Child.start(child, command, self._show, common | self._changes[child])

    def reload(self) -> None:
        """Let gateways reload their API keys and certificates, and stages the gateways' addresses."""
        for child in self._children:
            child.send_signal(signal.SIGHUP)

    def hurry(self) -> None:
        """Let :meth:`stop` abort open requests."""
        self._hurry.set()

    async def stop(self) -> None:
        """Drain and stop the gateways, then stop the stages; kill what is left after :data:`STOP_S`."""
        gateways, within_s = self._gateways(), self._config.gateway.drain_s + FAREWELL_S
        for gateway in gateways:
            gateway.terminate()
        waits = [asyncio.create_task(_drained(gateways, within_s)), asyncio.create_task(self._hurry.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if self._hurry.is_set():
            # Signals this close together count as one.
            await asyncio.sleep(TOGETHER_S)
        for child in self._children:
            # A second signal makes a gateway abort its requests.
            child.terminate()
        late = time.monotonic() + STOP_S
        for child in self._children:
            if not await child.wait(max(0.0, late - time.monotonic())):
                announce(f"the {child.name} did not stop within {STOP_S:.0f} s: killed")
                child.kill()
        for child in self._children:
            await child.wait()

    async def _wait_until_ready(self) -> StatusReport:
        started = time.monotonic()
        told = started
        announced: set[str] = set()
        missing = [child.name for child in self._children]
        with ProgressLine(lambda: f"waiting for {', '.join(missing)}") as progress:
            while True:
                self._check_alive("before all were ready")
                reports = await self._ask()
                now = time.monotonic()
                ready = _ready(reports)
                for name in ready.intersection(missing) - announced:
                    announce(f"the {name} is ready after {now - started:.1f} s")
                    announced.add(name)
                    told = now
                # A stage is ready again only when the one before it knows it.
                missing[:] = [child.name for child in self._children if child.name not in ready]
                first = next(iter(reports.values()))
                if first is not None and not missing:
                    return first
                if now - told > PROGRESS_S and not progress.visible:
                    announce(f"waiting for {', '.join(missing)} ({now - started:.0f} s)")
                    told = now
                await asyncio.sleep(POLL_S)

    def _gateways(self) -> list[Child]:
        return [child for child in self._children if child.name.partition(" ")[0] == "gateway"]

    def _replicas(self, name: str) -> int:
        """The configured number of processes of a kind."""
        stage = next((self._config.stage(stage) for stage in STAGES if stage == name), self._config.gateway)
        return stage.replicas

    def _own(self, name: str, number: int) -> dict[str, str]:
        """Return the environment of a further process of a kind: it needs addresses of its own."""
        stage = next((stage for stage in STAGES if stage == name), None)
        if stage is None:
            prefix = f"{ENV_PREFIX}GATEWAY__"
            gateway = self._config.gateway
            origins = json.dumps(gateway.page_origins)
            own = gateway.own_addresses(number) | {"replicas": "1", "http_gateways": origins}
        else:
            prefix = f"{ENV_PREFIX}STAGES__{name.upper()}__"
            own = own_addresses(self._config, stage, number)
        return {f"{prefix}{key.upper()}": address or "null" for key, address in own.items()}

    async def _ask(self) -> dict[str, StatusReport | None]:
        """Ask our own gateways for their status; None if one does not answer, or another program does."""
        gateways = self._gateways()
        reports = await asyncio.gather(*(self._ask_gateway(gateway) for gateway in gateways))
        return dict(zip((gateway.name for gateway in gateways), reports, strict=True))

    async def _ask_gateway(self, gateway: Child) -> StatusReport | None:
        number = int(gateway.name.partition(" ")[2] or 1)
        try:
            report = await probe_target(self._config, number).status()
        except (GatewayUnreachableError, MessageError):
            return None
        return report if report.gateway.pid == gateway.pid else None

    def _check_alive(self, when: str) -> None:
        for child in self._children:
            if not child.alive:
                lines = "".join(f"\n  [{child.name}] {line}" for line in child.tail)
                told = f"; its last lines:{lines}" if lines else " and said nothing"
                raise StageStartError(f"the {child.name} {child.ending} {when}{told}")


async def _drained(gateways: Sequence[Child], within_s: float) -> bool:
    return all(await asyncio.gather(*(gateway.wait(within_s) for gateway in gateways)))


def _ready(reports: Mapping[str, StatusReport | None]) -> set[str]:
    """Names of the ready processes: of the stages, those that all gateways have as ready."""
    answers = {name: report for name, report in reports.items() if report is not None}
    names = [_ready_stages(report) for report in answers.values()]
    return {*answers, *(set.intersection(*names) if names else ())}


def _ready_stages(report: StatusReport) -> set[str]:
    numbers = Counter(stage.name for stage in report.stages if stage.state == "ready")
    replicas = {f"{name} {number}" for name, count in numbers.items() for number in range(2, count + 1)}
    return {*numbers, *replicas}


@asynccontextmanager
async def running(stack: Stack) -> AsyncIterator[StatusReport]:
    """Start a stack, and always stop it.

    Raises:
        StageStartError: A process ended.
    """
    try:
        yield await stack.start()
    finally:
        await asyncio.shield(stack.stop())
