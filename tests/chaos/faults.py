"""What is done to a process of the stack."""

import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final, Literal

import zmq

from omnirelay.errors import OmniRelayError
from shared.messages import STAGES, StageName
from tests.support.garbage import noise, push
from tests.support.http import get
from tests.support.processes import wait_until
from tests.support.proxy import Relay
from tests.support.restarting import DRAIN_S, RestartingStack
from tests.support.victim import POISONS, Poison

Fault = Literal["kill", "freeze", "hang", "exit", "memory", "stop", "garbage", "cut"] | Poison
Target = StageName | Literal["gateway"]

FAULTS: Final[tuple[Fault, ...]] = ("kill", "freeze", "hang", "exit", "memory", "stop", "garbage")
GATEWAY_FAULTS: Final[tuple[Fault, ...]] = ("kill", "freeze", "stop", "garbage", "cut")
ALL_FAULTS: Final[tuple[Fault, ...]] = (*FAULTS, "cut", *POISONS)
MEANING: Final[dict[Fault, str]] = {
    "kill": "kill -9",
    "freeze": "SIGSTOP, later SIGCONT",
    "hang": "a step that never ends",
    "exit": "exit in a step",
    "memory": "out of memory in a step",
    "stop": "SIGTERM",
    "garbage": "garbage on its sockets",
    "cut": "cut off from its clients",
    "poison": "a request that fails its step",
    "segfault": "a request that ends its process",
}
ORPHANED_S: Final = 6.0
"""A gateway that is frozen for so long has been given up by its stages (``orphan_timeout_s`` is 5)."""
WITHIN_S: Final = 60.0
MESSAGES: Final = 300


@dataclass(frozen=True)
class Strike:
    """What was done.

    Attributes:
        at: When, in monotonic seconds.
        dies: A process has to end, and another one to take its place.
        rest: What follows: the process goes on, or the last of the garbage is sent.
    """

    at: float
    dies: bool
    rest: "Future[None]"


def strike(
    stack: RestartingStack, target: Target, fault: Fault, chance: random.Random, line: Relay | None = None
) -> Strike:
    """Do it, and return at once; what has to follow, goes on in a thread of its own.

    Args:
        line: By which the gateway's clients reach it; needed to cut it.
    """
    name = target if target == "gateway" else chance.choice(stack.of(target))
    at = time.monotonic()
    rest: Future[None] = Future()
    if fault == "kill":
        stack.signal(name, signal.SIGKILL)
    elif fault == "freeze":
        stack.signal(name, signal.SIGSTOP)
        longer_s = chance.uniform(0.2, 2.0)
        _later(lambda: _thaw(stack, name, longer_s), rest)
    elif fault == "hang":
        pid = stack.running[name].pid
        stack.order(name, chance.choice(["before", "after"]), fault)
        _later(lambda: _replace_hung(stack, name, pid), rest)
    elif fault == "stop":
        process = stack.running[name]
        process.terminate()
        _later(lambda: _await_clean_end(stack, process.pid), rest)
    elif fault == "cut" and line is not None:
        line.cut()
    elif fault == "garbage":
        seed = chance.randrange(2**32)
        _later(lambda: throw_garbage(stack, target, random.Random(seed)), rest)
    else:
        failure = "exit" if fault == "exit" else chance.choice(["memory", "device memory"])
        stack.order(name, chance.choice(["before", "after"]), failure)
    if fault in ("kill", "exit", "memory", "cut"):
        rest.set_result(None)
    dies = fault in ("kill", "hang", "exit", "memory", "stop")
    return Strike(at, dies, rest)


def _later(work: Callable[[], None], done: "Future[None]") -> None:
    def run() -> None:
        try:
            work()
        except (AssertionError, OSError, OmniRelayError, zmq.ZMQError) as error:
            done.set_exception(AssertionError(f"the fault could not be made: {error!r}"))
        else:
            done.set_result(None)

    threading.Thread(target=run, name="fault", daemon=True).start()


def _thaw(stack: RestartingStack, name: str, longer_s: float) -> None:
    """Let a frozen process go on some time after its absence was noticed."""
    process = stack.running[name]
    try:
        if name == "gateway":
            time.sleep(ORPHANED_S + longer_s)
        else:
            wait_until(
                lambda: _noticed(stack, process.pid), "the gateway notices the frozen replica", WITHIN_S
            )
            time.sleep(longer_s)
    finally:
        process.send_signal(signal.SIGCONT)


def _replace_hung(stack: RestartingStack, name: str, pid: int) -> None:
    """Do what an orchestrator does that asks ``/livez``: end a process that hangs."""
    address = stack.addresses(name)["http"]
    wait_until(lambda: _noticed(stack, pid), "the gateway notices the hung replica", WITHIN_S)
    wait_until(lambda: get(address, "/livez").status == 503, "the hung replica says so", WITHIN_S)
    stack.signal(name, signal.SIGKILL)


def _await_clean_end(stack: RestartingStack, pid: int) -> None:
    def status() -> int | None:
        return next((each.status for each in stack.deaths if each.pid == pid), None)

    wait_until(lambda: status() is not None, "the process ends", WITHIN_S + DRAIN_S)
    if status() != 0:
        raise AssertionError(f"the process that was told to stop ended with {status()}")


def _noticed(stack: RestartingStack, pid: int) -> bool:
    report = stack.status()
    return report is not None and any(each.pid == pid and each.state == "down" for each in report.stages)


def throw_garbage(stack: RestartingStack, target: Target, chance: random.Random) -> None:
    """Send what nobody can believe to every socket by which a process can be reached."""
    gateway = stack.config["gateway"]
    own = (
        [gateway["events"]]
        if target == "gateway"
        else [stack.addresses(each)["inbox"] for each in stack.of(target)]
    )
    for address in {*own, gateway["events"]}:
        push(address, noise(MESSAGES, chance.randrange(2**32)))
    report = stack.status()
    replicas = [each.replica or "" for each in report.stages] if report else []
    # Those of living replicas among them: ZeroMQ lets nobody take a name that is taken.
    names = [*STAGES, *replicas, *(f"{each.name}.{each.replica}" for each in report.stages)] if report else []
    for identity in chance.sample(names, min(4, len(names))):
        _deal(gateway["control"], identity.encode(), noise(50, chance.randrange(2**32)))
    for address in (*own, gateway["control"], gateway["events"], stack.address):
        _pour(address, chance.randbytes(4096))


def _deal(address: str, identity: bytes, messages: list[list[bytes]]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.set(zmq.IDENTITY, identity)
        # Not waited for: a name that is taken gets no connection.
        peer.set(zmq.LINGER, 200)
        peer.set(zmq.SNDTIMEO, 200)
        peer.connect(address)
        with suppress(zmq.Again):
            for frames in messages:
                peer.send_multipart(frames)


def _pour(address: str, data: bytes) -> None:
    """Be no ZeroMQ at all."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with closing(socket.create_connection((host, int(port)), timeout=10)) as peer, suppress(ConnectionError):
        peer.sendall(data)
