"""Hosts of their own on one machine: network namespaces, joined by a bridge that is in one of its own.

Nothing of it has a name on the machine, so nothing is left of it when the test's process and those that it
started have ended.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, Self

NET: Final = "10.77.0"
_NEW_NET: Final = 0x40000000
"""``CLONE_NEWNET`` of sched.h; Python has its functions from 3.12 on."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """A network namespace; threads and processes that are started inside stay there.

    Args:
        name: What it is called in errors.
    """

    def __init__(self, name: str) -> None:
        self.name: Final = name
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _call("unshare", _NEW_NET)
            try:
                self._descriptor: Final = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            finally:
                _call("setns", home, _NEW_NET)
        finally:
            os.close(home)
        self.run("ip", "link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """What ``ip`` finds it by."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let the calling thread be there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _call("setns", self._descriptor, _NEW_NET)
            try:
                yield
            finally:
                _call("setns", home, _NEW_NET)
        finally:
            os.close(home)

    def run(self, *command: str) -> None:
        """Run a command there, which must succeed."""
        with self.inside():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stderr or done.stdout}"

    def close(self) -> None:
        """Let go of it; it ends with the last process that is inside."""
        os.close(self._descriptor)


class Host(Namespace):
    """A host with one interface, on the network.

    Args:
        name: Its name.
        number: Of its address.
        switch: Where the bridge is.

    Attributes:
        address: By which the others reach it.
    """

    def __init__(self, name: str, number: int, switch: Namespace) -> None:
        super().__init__(name)
        self.address: Final = f"{NET}.{number}"
        self._switch: Final = switch
        self._port: Final = f"port{number}"
        switch.run(
            "ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self.path
        )
        switch.run("ip", "link", "set", self._port, "master", "bridge", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Nothing comes to it and nothing leaves it, and nobody is told."""
        self._switch.run("ip", "link", "set", self._port, "down")
        try:
            yield
        finally:
            self._switch.run("ip", "link", "set", self._port, "up")

    @contextmanager
    def deaf_to(self, other: "Host") -> Iterator[None]:
        """What another host sends does not come here; what is sent there arrives."""
        with self._rule("--source", other.address, "--jump", "DROP"):
            yield

    @contextmanager
    def resetting(self, other: "Host", port: int) -> Iterator[None]:
        """Another host's connections to a port are reset when it sends, as if a firewall had forgotten them.

        This host does not hear of it: its ends stay open.
        """
        way = ("--source", other.address, "--protocol", "tcp", "--dport", str(port))
        with self._rule(*way, "--jump", "REJECT", "--reject-with", "tcp-reset"):
            yield

    @contextmanager
    def losing(self, share: float) -> Iterator[None]:
        """Packets that come here are lost by chance; ``share`` is from 0 to 1."""
        chance = ("--match", "statistic", "--mode", "random", "--probability", f"{share:g}")
        with self._rule(*chance, "--jump", "DROP"):
            yield

    @contextmanager
    def slow(self, megabits: float) -> Iterator[None]:
        """So many megabits a second come through, each way."""
        bucket = ("tbf", "rate", f"{megabits:g}mbit", "burst", "32kb", "latency", "200ms")
        ends: tuple[tuple[Namespace, str], ...] = (self, "eth0"), (self._switch, self._port)
        with ExitStack() as undo:
            for end, device in ends:
                end.run("tc", "qdisc", "add", "dev", device, "root", *bucket)
                undo.callback(end.run, "tc", "qdisc", "del", "dev", device, "root")
            yield

    @contextmanager
    def _rule(self, *rule: str) -> Iterator[None]:
        """A rule for what comes in from the network; the loopback is spared."""
        whole = ("INPUT", "--in-interface", "eth0", *rule)
        self.run("iptables", "--wait", "--insert", *whole)
        try:
            yield
        finally:
            self.run("iptables", "--wait", "--delete", *whole)


class Network:
    """Hosts that reach each other.

    Args:
        names: Of the hosts.
    """

    def __init__(self, *names: str) -> None:
        self._switch = Namespace("switch")
        self._switch.run("ip", "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        self._switch.run("ip", "link", "set", "bridge", "up")
        self.hosts: Final = {name: Host(name, number, self._switch) for number, name in enumerate(names, 1)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self.hosts.values(), self._switch):
            each.close()


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}; tests of hosts apart need root")
