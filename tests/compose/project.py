"""A project of Docker Compose, as ``docker compose`` on the command line sees it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.support.children import ROOT

STAGES = ("thinker", "talker", "token2wav")
SERVING = (*STAGES, "gateway")
POLL_S = 0.5


def say(line: str) -> None:
    print(f"\n[compose] {line}", flush=True)


def docker(*arguments: str) -> str:
    """What ``docker`` prints; it must succeed."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


class Project:
    """One project of its own name, on free ports.

    Args:
        name: The project's.
        ports: Of the host, by the name of the variable that chooses them.
        files: Compose files besides compose.yaml.
    """

    def __init__(self, name: str, ports: dict[str, int], *files: Path) -> None:
        self.name = name
        self.ports = ports
        self._environment = {**os.environ, **{variable: str(port) for variable, port in ports.items()}}
        names = [part for file in (ROOT / "compose.yaml", *files) for part in ("-f", str(file))]
        self._command = ["docker", "compose", "--progress", "plain", "-p", name, *names]

    def run(self, *arguments: str, timeout_s: float = 60.0) -> None:
        """Run a command of Compose, its output on ours; it must succeed."""
        say(f"docker compose {' '.join(arguments)}")
        started = time.monotonic()
        command = [*self._command, *arguments]
        try:
            status = subprocess.run(
                command, cwd=ROOT, env=self._environment, check=False, timeout=timeout_s
            ).returncode
            ended = f"ended with {status}"
        except subprocess.TimeoutExpired:
            status, ended = None, "was stopped"
        say(f"docker compose {arguments[0]} {ended} after {time.monotonic() - started:.0f} s")
        if status != 0:
            self.show_failure()
        assert status == 0

    def output(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command of Compose and keep what it prints, errors included."""
        return subprocess.run(
            [*self._command, *arguments],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def inspect(self, service: str) -> dict[str, Any]:
        """What ``docker inspect`` says of a service's container."""
        found: list[dict[str, Any]] = json.loads(docker("inspect", f"{self.name}-{service}-1"))
        return found[0]

    def health(self, service: str) -> str:
        state = self.inspect(service)["State"]
        return str(state["Health"]["Status"] if state["Running"] else state["Status"])

    def wait_for(self, service: str, health: str, deadline_s: float) -> None:
        """Wait until Docker says so of a service."""
        started = time.monotonic()
        while (found := self.health(service)) != health:
            assert time.monotonic() - started < deadline_s, f"the {service} is {found}, not {health}"
            time.sleep(POLL_S)
        say(f"the {service} is {health} after {time.monotonic() - started:.0f} s")

    def left(self) -> list[str]:
        """Containers, networks and volumes that carry the project's name."""
        label = f"label=com.docker.compose.project={self.name}"
        return [
            line
            for kind, every in (("container", ["--all"]), ("network", []), ("volume", []))
            for line in docker(kind, "ls", *every, "--quiet", "--filter", label).splitlines()
        ]

    def show_failure(self) -> None:
        """Print the log of every service that is not well, and what its health check said last."""
        names = docker(
            "ps",
            "--all",
            "--filter",
            f"label=com.docker.compose.project={self.name}",
            "--format",
            "{{.Names}}",
        ).splitlines()
        for name in names:
            state = json.loads(docker("inspect", "--format", "{{json .State}}", name))
            health = state.get("Health", {})
            if health.get("Status") == "healthy" or (not health and state["ExitCode"] == 0):
                continue
            say(f"{name}: {state['Status']}, exit code {state['ExitCode']}, {health.get('Status', '')}")
            for check in health.get("Log") or []:
                print(f"    check: {check['ExitCode']} {check['Output'].strip()}")
            subprocess.run(["docker", "logs", "--tail", "60", name], check=False, timeout=60)
