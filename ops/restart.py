"""``omnirelay restart``: replaces processes of ``omnirelay up`` one by one, while the others serve."""

import argparse
import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

from omnirelay import StatusReport
from omnirelay.cli.output import say
from omnirelay.cli.progress import ProgressLine
from omnirelay.errors import ConfigError, GatewayUnreachableError, MessageError, StageStartError
from ops.addresses import MODULES, overrides, read_of
from ops.launcher import POLL_S, RENEW, ready_pids
from ops.target import probe_target
from shared.config import Config, load_config
from shared.messages import Role

_PROC: Final = Path("/proc")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        OmniRelayError: No stack of this machine's ``omnirelay up`` serves, or it ended meanwhile.
    """
    config = load_config(arguments.config, os.environ | overrides(arguments))
    every: list[Role] = [*config.served_stages, "gateway"]
    kinds = every if arguments.process == "all" else [arguments.process]
    try:
        asyncio.run(_restart(config, kinds))
    except PermissionError as error:
        raise ConfigError("the stack is another user's: restart it as that user") from error
    return 0


async def _restart(config: Config, kinds: list[Role]) -> None:
    launcher = _launcher(await probe_target(config).status())
    for kind in kinds:
        pids = _children(launcher, kind)
        if not pids and len(kinds) == 1:
            raise ConfigError(f"the stack has no {kind}")
        for pid in pids:
            if not await _serve(config, kind, _children(launcher, kind)):
                raise StageStartError(
                    f"not every {kind} is ready: see `omnirelay status`, and restart it then"
                )
            if pid not in _children(launcher, kind):
                # It ended by itself meanwhile, and was started again.
                continue
            # It may end by itself meanwhile.
            with suppress(ProcessLookupError):
                if kind == "gateway":
                    # The stack does not end with its only one.
                    os.kill(launcher, RENEW)
                os.kill(pid, signal.SIGTERM)
            with ProgressLine(lambda kind=kind: f"waiting for the next {kind}"):  # type: ignore[misc]
                await _replaced(config, launcher, kind, pid, len(pids))
            say(f"the {kind}, pid {pid}, was replaced")


async def _replaced(config: Config, launcher: int, kind: Role, before: int, number: int) -> None:
    """Wait until another process serves in place of one."""
    while True:
        pids = _children(launcher, kind)
        if before not in pids and len(pids) == number and await _serve(config, kind, pids):
            return
        if not (_PROC / str(launcher)).exists():
            raise StageStartError(f"the stack ended while a {kind} was restarted; its log says why")
        await asyncio.sleep(POLL_S)


async def _serve(config: Config, kind: str, pids: list[int]) -> bool:
    """Whether every gateway answers, and has these processes as ready."""
    try:
        reports = [
            await probe_target(config, number).status() for number in range(1, config.gateway.replicas + 1)
        ]
    except (GatewayUnreachableError, MessageError):
        return False
    served = kind != "gateway" or all(each.ready for each in reports)
    return served and ready_pids(reports).issuperset(pids)


def _launcher(report: StatusReport) -> int:
    """The process id of the ``omnirelay up`` that started a gateway."""
    pid = report.gateway.pid
    try:
        # Behind the name, which may contain anything.
        parent = int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        if not {"up", "serve"}.isdisjoint(_command(parent)):
            return parent
    except OSError as error:
        raise ConfigError(f"the gateway, pid {pid}, does not run on this machine") from error
    raise ConfigError(f"the gateway, pid {pid}, was not started by `omnirelay up`: use what started it")


def _children(launcher: int, kind: Role) -> list[int]:
    """The process ids of a launcher's processes of a kind."""
    children = read_of(_PROC / str(launcher), f"task/{launcher}/children").split()
    return [int(pid) for pid in children if MODULES[kind] in _command(int(pid))]


def _command(pid: int) -> list[str]:
    """What a process runs; nothing if it has ended."""
    return read_of(_PROC / str(pid), "cmdline").split("\0")
