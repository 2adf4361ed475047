"""The actor that runs one process of the stack on the node where Ray has placed it."""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
import yaml

from ops.addresses import MODULES
from ops.child import STOP_S, Child
from ops.cluster import keys, plan
from ops.cluster.keys import KeyFiles
from ops.cluster.members import GatewayReport, Placed, Report, State, ask
from ops.cluster.plan import CONTROLLER, NAMESPACE
from ops.console import console
from shared.config import ENV_PREFIX, Config, GatewayAddresses, is_ours, load_config
from shared.messages import ROLES, Role

ANSWER_S: Final = 5.0
"""How long an actor may take to answer."""
POLL_S: Final = 1.0
"""Interval at which the gateways' addresses are read."""

Gateways = Sequence[GatewayAddresses]
"""Where the gateways are; for a gateway itself, none."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """What an actor needs to run its process.

    Attributes:
        kind: The process.
        name: The actor's own.
        settings: The configuration, in YAML.
        keys: Key files of this process; none without keys.
    """

    kind: Role
    name: str
    settings: str
    keys: KeyFiles


class ProcessActor:
    """Runs one process and ends with it; Ray starts both again, on this node or another.

    All methods but :meth:`stop` return at once.
    """

    def __init__(self, launch: Launch) -> None:
        # The settings have them already, as they were where the stack was started.
        for name in filter(is_ours, list(os.environ)):
            del os.environ[name]
        self._launch = launch
        self._host = str(ray.util.get_node_ip_address())
        self._folder = tempfile.TemporaryDirectory(prefix="omnirelay-")
        folder = Path(self._folder.name)
        self._sweeper = keys.remove_at_end(folder)
        keys.write(launch.keys, folder)
        self._path = folder / "config.yaml"
        self._write_settings(launch.settings)
        self._config: Config = load_config(self._path, {})
        self._known: dict[str, GatewayAddresses] = {}
        self._child: Child | None = None
        self._stopping = False
        self._running = essential(self._run())

    async def report(self) -> Placed:
        """The process and where it is."""
        launch = self._launch
        clients: tuple[str, ...] = ()
        if launch.kind == "gateway":
            clients = plan.client_addresses(self._config, self._number, self._host)
        node = str(ray.get_runtime_context().get_node_id())
        state: State = "stopping" if self._stopping else "waiting" if self._child is None else "running"
        report = Report(state, None if self._child is None else self._child.pid)
        return Placed(launch.name, launch.kind, node, self._host, report, clients)

    async def addresses(self) -> GatewayAddresses:
        """Of a gateway: where stages meet it."""
        return plan.gateway_addresses(self._config, self._number, self._host)

    async def ask(self) -> GatewayReport | None:
        """Of a gateway: what it tells about the stack; None while it does not answer."""
        return await ask(self._config, self._number)

    async def stop(self) -> None:
        """Let the process finish its requests and end."""
        self._stopping = True
        if self._child is not None:
            await self._child.end(self._config.process(self._launch.kind).drain_s + STOP_S)
        self._running.cancel()
        self._folder.cleanup()

    async def _run(self) -> None:
        """Start the process once there is a gateway to meet, and tell it when their addresses change."""
        while (gateways := await self._gateways()) is None:
            await asyncio.sleep(POLL_S)
        self._write(gateways)
        command = [sys.executable, "-m", MODULES[self._launch.kind], "--config", str(self._path)]
        child = await Child.start(self._launch.name, command, console.show, self._own())
        self._child = child
        while not await child.wait(POLL_S):
            now = await self._gateways()
            if now is not None and now != gateways:
                gateways = now
                self._write(gateways)
                child.send_signal(signal.SIGHUP)
        if not self._stopping:
            await answer(CONTROLLER, "ended", ANSWER_S, self._launch.name, child.ending, tuple(child.tail))
            os._exit(1)

    @property
    def _number(self) -> int:
        return plan.number_of(self._launch.name)

    def _own(self) -> dict[str, str]:
        """The process's own variables."""
        kind = self._launch.kind
        own = {}
        if self._launch.keys:
            own[f"{ENV_PREFIX}SECURITY__KEYS"] = yaml.safe_dump(self._folder.name).partition("\n")[0]
        if kind == "gateway":
            own |= plan.gateway_variables(self._config, self._number, self._host)
        else:
            own |= plan.stage_addresses(self._config, kind, self._host, _free_port())
        return own

    async def _gateways(self) -> Gateways | None:
        """Where the gateways are that a stage meets; of each as last heard, while it does not answer."""
        if self._launch.kind == "gateway":
            return []
        names = actors("gateway")
        answers = await asyncio.gather(*(answer(name, "addresses") for name in names))
        heard = {name: each for name, each in zip(names, answers, strict=True) if each is not None}
        self._known = {name: each for name, each in (self._known | heard).items() if name in names}
        return [self._known[name] for name in sorted(self._known)] or None

    def _write(self, gateways: Gateways) -> None:
        if gateways:
            self._write_settings(plan.stage_settings(self._launch.settings, gateways))

    def _write_settings(self, text: str) -> None:
        """Replace the file at once: the process may be reading it."""
        new = self._path.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        new.replace(self._path)


def actors(kind: Role | None = None) -> list[str]:
    """The actors that run processes, all or those of a kind, in order."""
    kinds = {name: plan.kind_of(name) for name in ray.util.list_named_actors()}
    found = [name for name, each in kinds.items() if each is not None and kind in (None, each)]
    return sorted(found, key=lambda name: (ROLES.index(kinds[name]), plan.number_of(name)))


def essential(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Start a task without which its actor is of no use: if it fails, the actor ends, and Ray restarts it."""

    def ended(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("an actor failed", exc_info=task.exception())
            os._exit(1)

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task


async def answer(name: str, method: str, within_s: float = ANSWER_S, *arguments: Any) -> Any:
    """Call a method of an actor; None if it is not there, or does not answer in time."""
    try:
        handle = ray.get_actor(name, namespace=NAMESPACE)
        return await asyncio.wait_for(getattr(handle, method).remote(*arguments), within_s)
    except (ValueError, TimeoutError, ray.exceptions.RayError):
        # No such actor; one that is being placed; one whose node is gone.
        return None


def _free_port() -> int:
    with closing(socket.create_server(("", 0))) as probe:
        return int(probe.getsockname()[1])
