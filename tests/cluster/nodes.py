"""A Ray cluster of several nodes on one machine: real raylets, each with an address of its own."""

import os
import signal
from typing import Any, Final, Self

import psutil

from tests.support.processes import wait_until

NODES: Final = 4
CPUS: Final = 3
"""Of each node: any two of them have room for all processes of a test."""
SLOT: Final = "slot"
"""A resource of which each node but the head has one: processes that need it are on different nodes."""
NODE: Final = {"num_cpus": CPUS, "num_gpus": 0, "object_store_memory": 80 * 2**20}
"""With about the smallest object store that Ray takes."""
SYSTEM: Final = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
"""A node is given up after about twenty seconds of silence, not after a minute."""


class RayNodes:
    """The head, which no test kills, and further nodes, which go and come.

    Attributes:
        address: Of the cluster, as ``--address`` takes it.
    """

    def __init__(self) -> None:
        # Workers of Ray have the lowest priority unless this is set, as docs/cluster.md says.
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - only this part needs Ray

        head = {**NODE, "include_dashboard": False, "_system_config": SYSTEM}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self._added: dict[str, Any] = {}
        self._numbers = iter(range(2, 250))

    def __enter__(self) -> Self:
        for _ in range(NODES - 1):
            self.add()
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()

    def add(self) -> None:
        """Let a node join."""
        node = self._cluster.add_node(
            node_ip_address=f"127.0.0.{next(self._numbers)}", resources={SLOT: 1}, **NODE
        )
        self._added[node.node_ip_address] = node

    def processes(self, host: str) -> list[psutil.Process]:
        """The raylet of a node that can be killed, its workers, and what they have started."""
        (raylet,) = self._added[host].all_processes["raylet"]
        top = psutil.Process(raylet.process.pid)
        return [top, *top.children(recursive=True)]

    def kill(self, host: str) -> list[psutil.Process]:
        """Kill all processes of a node at once, as a power cut does."""
        victims = self.processes(host)
        for each in victims:
            each.send_signal(signal.SIGKILL)
        self._forget(host)
        return victims

    def freeze(self, host: str) -> list[psutil.Process]:
        """Stop all processes of a node, as a network that is cut looks to others."""
        victims = self.processes(host)
        for each in victims:
            each.send_signal(signal.SIGSTOP)
        return victims

    def thaw(self, host: str, victims: list[psutil.Process]) -> None:
        """Let them run again; they find that the cluster has gone on without them, and end."""
        for each in victims:
            each.send_signal(signal.SIGCONT)
        self._forget(host)

    def can_be_killed(self, host: str) -> bool:
        """Whether a node is not the head."""
        return host in self._added

    def _forget(self, host: str) -> None:
        node = self._added.pop(host)
        wait_until(lambda: node.all_processes["raylet"][0].process.poll() is not None, "the raylet has ended")
        self._cluster.remove_node(node, allow_graceful=False)
