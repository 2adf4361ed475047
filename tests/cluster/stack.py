"""A stack on a Ray cluster, run by ``omnirelay cluster`` as an operator does."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psutil
import yaml

from omnirelay import Client, StatusReport
from tests.chaos.streams import Stream
from tests.cluster.nodes import RayNodes
from tests.support.processes import wait_until
from tests.support.stack import COMMAND, inherited, make_config

COMMAND_S: Final = 420.0
STREAMS: Final = 8


@dataclass(frozen=True)
class Process:
    """A process of the stack, as ``omnirelay cluster status --json`` tells it.

    Attributes:
        name: E.g. ``talker-2``.
        host: The address of its node; none while it waits for one.
        pid: Its id.
        ready: It takes requests.
        restarts: How often it was started again on this node.
        clients: Where clients reach it, of a gateway.
    """

    name: str
    host: str | None
    pid: int | None
    ready: bool
    restarts: int
    clients: tuple[str, ...]


def folder_of(pid: int | None) -> Path:
    """Where the settings and keys of a process are."""
    command = psutil.Process(pid).cmdline()
    return Path(command[command.index("--config") + 1]).parent


class ClusterStack:
    """A stack on a Ray cluster, from up to down.

    Args:
        nodes: The cluster.
        model: The checkpoint.
        directory: For the configuration.
        changes: To the configuration.
    """

    def __init__(self, nodes: RayNodes, model: Path, directory: Path, **changes: Any) -> None:
        self.nodes = nodes
        config = make_config(model, **changes)
        for stage in config["stages"].values():
            # Beside other work on this machine, each answer would take minutes.
            stage["niceness"] = 0
        self.address: str = config["gateway"]["listen"]
        self.path = directory / "cluster.yaml"
        self.path.write_text(yaml.safe_dump(config), encoding="utf-8")

    def __enter__(self) -> Self:
        print(self.run("up", "--config", str(self.path)))
        return self

    def __exit__(self, *_: object) -> None:
        folders = [folder_of(each.pid) for each in self.processes().values() if each.pid and each.ready]
        self.run("down")
        wait_until(lambda: not any(each.exists() for each in folders), "no key is left", COMMAND_S)

    def run(self, *arguments: str) -> str:
        """Call ``omnirelay cluster``; what it prints."""
        done = self.call(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [COMMAND, "cluster", *arguments, "--address", self.nodes.address],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            env=inherited(),
            check=False,
        )

    def processes(self) -> dict[str, Process]:
        found = {}
        for each in json.loads(self.run("status", "--json")):
            placed = each["placed"] or {"host": None, "clients": [], "report": {"pid": None, "restarts": 0}}
            report, clients = placed["report"], tuple(placed["clients"])
            found[each["name"]] = Process(
                each["name"], placed["host"], report["pid"], each["ready"], report["restarts"], clients
            )
        return found

    def wait_until_ready(self) -> dict[str, Process]:
        """Wait until all processes take requests."""
        wait_until(lambda: all(each.ready for each in self.processes().values()), "all are ready", COMMAND_S)
        return self.processes()

    def status(self) -> StatusReport:
        with Client(self.address) as client:
            return client.status()

    def ask(self, client: Client) -> list[Stream]:
        """Begin the eight streams."""
        return [Stream(client, number) for number in range(STREAMS)]
