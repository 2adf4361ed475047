"""The processes of the stack on one machine: started together, watched, stopped together."""

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from omnirelay import StatusReport
from omnirelay.cli.progress import ProgressLine
from omnirelay.errors import (
    ConfigError,
    EngineFailedError,
    GatewayUnreachableError,
    MessageError,
    StageStartError,
)
from omnirelay.tasks import all_of, first_of
from ops.addresses import MODULES, require_free, variables
from ops.child import STOP_S, Child, last_words
from ops.console import announce, console
from ops.target import probe_target
from shared.config import ENV_PREFIX, Config
from shared.ending import TOGETHER_S
from shared.messages import Role

FAREWELL_S: Final = 3.0
"""Time for the gateway to report aborted requests to their clients."""
MOST_RESTARTS: Final = 5
RESTARTS_WITHIN_S: Final = 60.0
"""Limit of restarts of one process that ends before it has served."""
RENEW: Final = signal.SIGUSR1
"""Tells a launcher that the gateway which ends next is to be replaced, also the only one."""
AGAIN_S: Final = 1.0
"""Pause before a start is tried again that the machine had no memory, process or file for."""
POLL_S: Final = 0.2
PROGRESS_S: Final = 5.0


class Stack:
    """The gateways and the replicas of the stages.

    Args:
        config: Their configuration.
        config_path: Its file, which each process reads; None for the defaults.
        show: Called with the name of a process and a line of its output.
        environment: Variables of all processes, beside those of this one.

    Raises:
        ConfigError: The file cannot be read repeatedly, as a pipe.
    """

    def __init__(
        self,
        config: Config,
        config_path: Path | None,
        show: Callable[[str, str], None] | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if config_path is not None and not config_path.is_file():
            raise ConfigError(
                f"the configuration {config_path} is no regular file, but every process and every restart "
                "reads it: write it to a file first"
            )
        self._config = config
        # All processes are on this machine, so stages on one GPU divide it.
        self._common: dict[str, str] = {f"{ENV_PREFIX}SHARE_GPUS": "true", **environment}
        self._arguments = ["--config", str(config_path)] if config_path else []
        self._show = show or console.show
        self._children: list[Child] = []
        self._hurry = asyncio.Event()
        self._renewing = False
        # By child: module and own environment variables, and the times of restarts since it last served.
        self._starts: dict[str, tuple[str, dict[str, str]]] = {}
        self._restarts: dict[str, list[float]] = {}

    async def start(self) -> StatusReport:
        """Start all processes and wait until they are ready.

        Returns:
            Their status.

        Raises:
            AddressInUseError: Another process listens at one of their addresses.
            StageStartError: One ended; the message says which, and its last lines.
        """
        require_free(self._config)
        for role in self._config.roles:
            for number in range(1, self._config.process(role).replicas + 1):
                child = f"{role} {number}" if number > 1 else role
                self._starts[child] = MODULES[role], self._own(role, number) if number > 1 else {}
                self._children.append(await self._launch(child))
        return await self._wait_until_ready()

    async def watch(self) -> None:
        """Restart processes that end; a stop is asked of the launcher.

        Gateways resume the requests of stages, and clients those of gateways.

        Raises:
            StageStartError: The last gateway ended, or a process repeatedly ends before it serves; the
                message has the last lines.
        """
        while True:
            starting = not all(child.served for child in self._children)
            ends = [child.ended for child in self._children]
            within_s = POLL_S if starting else None
            await asyncio.wait(ends, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if starting:
                await self._ask()
            for index, child in enumerate(list(self._children)):
                if not child.alive:
                    await self._check_restart(child)
                    level = logging.WARNING if child.status else logging.INFO
                    announce(f"the {child.name} {child.ending}: it is started again", level)
                    self._children[index] = await self._launch_again(child.name)
                    break

    async def _check_restart(self, child: Child) -> None:
        gateways = self._gateways()
        others = [each for each in gateways if each is not child]
        is_last = not others or (child.status == 0 and not any(each.alive for each in others))
        if child in gateways:
            renewed, self._renewing = self._renewing and child.status == 0, False
            if is_last and not renewed:
                self._check_alive("while the stack was running")
        if not child.served:
            # Gateways still list a stage that served only briefly.
            await self._ask()
        now = time.monotonic()
        if child.served or child.status == EngineFailedError.exit_status:
            # The cause came from outside, a request or an operator, and must not end the stack.
            self._restarts.pop(child.name, None)
            return
        recent = [each for each in self._restarts.get(child.name, []) if now - each < RESTARTS_WITHIN_S]
        if len(recent) >= MOST_RESTARTS:
            self._check_alive("while the stack was running")
        self._restarts[child.name] = [*recent, now]

    async def _launch(self, child: str) -> Child:
        module, changes = self._starts[child]
        command = [sys.executable, "-m", module, *self._arguments]
        try:
            return await Child.start(child, command, self._show, self._common | changes)
        except OSError as error:
            raise StageStartError(f"the {child} cannot be started: {error}") from error

    async def _launch_again(self, child: str) -> Child:
        """Start a process as soon as the machine has room: the others serve meanwhile."""
        while True:
            try:
                return await self._launch(child)
            except StageStartError as error:
                announce(f"{error}; it is tried again in {AGAIN_S:g} s", logging.WARNING)
                await asyncio.sleep(AGAIN_S)

    def reload(self) -> None:
        """Let gateways reload their API keys and certificates, and stages the gateways' addresses."""
        for child in self._children:
            child.send_signal(signal.SIGHUP)

    def renew(self) -> None:
        """Replace the gateway that ends next, also the only one."""
        self._renewing = True

    def hurry(self) -> None:
        """Let :meth:`stop` abort open requests."""
        self._hurry.set()

    async def stop(self) -> None:
        """Drain and stop the gateways, then stop the stages; kill what is left after :data:`STOP_S`."""
        await self._drain(self._gateways(), self._config.gateway.drain_s + FAREWELL_S)
        if self._config.gateway.others:
            # Those of other machines may have requests at these stages.
            longest_s = max(self._config.process(role).drain_s for role in self._config.roles)
            await self._drain(self._children, longest_s)
        if self._hurry.is_set():
            # Signals this close together count as one.
            await asyncio.sleep(TOGETHER_S)
        # A second signal makes a gateway abort its requests.
        await asyncio.gather(*(child.end(STOP_S) for child in self._children))

    async def _drain(self, children: Sequence[Child], within_s: float) -> None:
        """Ask processes to stop, and wait until they have, or are to hurry."""
        for child in children:
            child.terminate()
        await first_of(all_of(child.wait(within_s) for child in children), self._hurry.wait())

    async def _wait_until_ready(self) -> StatusReport:
        started = time.monotonic()
        said_at = started
        announced: set[str] = set()
        missing = [child.name for child in self._children]
        with ProgressLine(lambda: f"waiting for {', '.join(missing)}") as progress:
            while True:
                self._check_alive("before all were ready")
                reports = await self._ask()
                now = time.monotonic()
                pids = ready_pids(reports.values())
                ready = {child.name for child in self._children if child.pid in pids}
                for name in ready.intersection(missing) - announced:
                    announce(f"the {name} is ready after {now - started:.1f} s")
                    announced.add(name)
                    said_at = now
                # A stage is ready again only when the one before it knows it.
                missing[:] = [child.name for child in self._children if child.name not in ready]
                first = next(iter(reports.values()))
                if first is not None and not missing:
                    return first
                if now - said_at > PROGRESS_S and not progress.visible:
                    announce(f"waiting for {', '.join(missing)} ({now - started:.0f} s)")
                    said_at = now
                await asyncio.sleep(POLL_S)

    def _gateways(self) -> list[Child]:
        return [child for child in self._children if child.name.partition(" ")[0] == "gateway"]

    def _own(self, role: Role, number: int) -> dict[str, str]:
        """Return the environment of a further process of a role: it needs addresses of its own."""
        own = self._config.process(role).own_addresses(number)
        if role == "gateway":
            own |= {"replicas": "1", "http_gateways": json.dumps(self._config.gateway.page_origins)}
        return variables(role, own)

    async def _ask(self) -> dict[str, StatusReport | None]:
        """Ask our own gateways for their status; None if one does not answer, or another program does."""
        gateways = self._gateways()
        reports = await asyncio.gather(*(self._ask_gateway(gateway) for gateway in gateways))
        answers = [report for report in reports if report is not None]
        pids = {report.gateway.pid for report in answers}
        pids |= {stage.pid for report in answers for stage in report.stages if stage.pid is not None}
        for child in self._children:
            child.served = child.served or child.pid in pids
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
                raise StageStartError(f"the {last_words(child.name, f'{child.ending} {when}', child.tail)}")


def ready_pids(reports: Iterable[StatusReport | None]) -> set[int]:
    """The processes that are ready: gateways that answer, and stages that all of these have as ready."""
    answers = [report for report in reports if report is not None]
    stages = [{stage.pid for stage in report.stages if stage.state == "ready"} for report in answers]
    ready = set.intersection(*stages) if stages else set()
    return {report.gateway.pid for report in answers} | {pid for pid in ready if pid is not None}


@asynccontextmanager
async def running(stack: Stack) -> AsyncIterator[StatusReport]:
    """Start a stack, and always stop it.

    Raises:
        StageStartError: A process ended.
    """
    try:
        yield await stack.start()
    finally:
        stopping = asyncio.create_task(stack.stop())
        while not stopping.done():
            # Cancelled while it stops, as by Ctrl-C after an error: it stops in order, and the error is told.
            with suppress(asyncio.CancelledError):
                await asyncio.shield(stopping)
        stopping.result()


async def work_with(stack: Stack, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do some work with a stack, and stop the stack at its end.

    Raises:
        StageStartError: A process ended; that explains why the work failed.
    """
    async with running(stack):
        # Both end before the stack stops, which the one would take for a failure and the other for a loss.
        await first_of(stack.watch(), work())
