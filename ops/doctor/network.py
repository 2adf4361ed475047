"""Check the addresses, distinct, free or used by a running OmniRelay, not open to others; and calls."""

import asyncio
import errno
import os
import socket
from collections import defaultdict
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

from omnirelay import StatusReport
from omnirelay.errors import GatewayUnreachableError, MessageError
from ops.addresses import ANYWHERE, holder, our_holder, split, used, why_not
from ops.doctor.finding import Findings, ok, problem, warning
from ops.target import probe_target
from shared.config import Config
from shared.config.values import WILDCARDS, is_local

PORTS: Final = "ports"
GATEWAYS: Final = "gateways"
CONNECT_S: Final = 2.0
STATUS_S: Final = 5.0
CLIENTS: Final = ("gateway.listen", "gateway.http")
"""Guarded by API keys and TLS, which :mod:`ops.doctor.access` checks."""


def check_addresses(config: Config) -> Findings:
    """Check that no two sockets share an address, and which other machines can reach."""
    keys: dict[str, list[str]] = defaultdict(list)
    for key, address in used(config):
        keys[_place(address)].append(key)
    shared = {place: names for place, names in keys.items() if len(names) > 1}
    for place, names in shared.items():
        what = f"{', '.join(names)} are the same address, {place}"
        yield problem("addresses", what, "give each a port of its own")
    guarded = config.inner_addresses() if config.security.keys is not None else {}
    open_ones = [
        f"{key} {address}"
        for key, address in used(config)
        # Of a further process as of the first.
        if key.partition(" (")[0] not in (*CLIENTS, *guarded) and not is_local(address)
    ]
    if open_ones:
        advice = "there is no authentication: let only a trusted network reach it"
        yield warning("addresses", f"can be reached from other machines: {', '.join(open_ones)}", advice)
    if not shared and not open_ones:
        others = ", or who has a key" if any(not is_local(each) for each in guarded.values()) else ""
        what = f"all are different, and only this machine can reach those of the stages{others}"
        yield ok("addresses", what)


def check_others(config: Config) -> Findings:
    """Check the gateways elsewhere, ``gateway.others``: whether stages could reach them, and do now."""
    ours = {_place(address): key for key, address in used(config)}
    problems, silent = 0, []
    for index, other in enumerate(config.gateway.others):
        for key, address in (("events", other.events), ("control", other.control)):
            setting = f"gateway.others.{index}.{key}"
            same, host = ours.setdefault(_place(address), setting), address.removeprefix("tcp://")
            wrong = f"{same} is the same address" if same != setting else None
            if host.rpartition(":")[0] in WILDCARDS:
                wrong = "stands for all addresses of a machine, so nobody can connect to it"
            if wrong is not None:
                problems += 1
                what = f"{address} ({setting}): {wrong}"
                yield problem(GATEWAYS, what, "give it that gateway's own address")
            elif (error := _why_unreachable(address)) is not None:
                silent.append(f"{address} ({setting}: {error})")
    if silent:
        advice = "right if that gateway does not run yet; else correct the address"
        yield warning(GATEWAYS, f"nobody answers at {', '.join(silent)}", advice)
    elif config.gateway.others and not problems:
        yield ok(GATEWAYS, f"all {len(config.gateway.others)} of gateway.others can be reached")


def _why_unreachable(address: str) -> str | None:
    """Why no connection can be made now; None if one was."""
    try:
        if address.startswith("ipc://"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(address.removeprefix("ipc://"))
        else:
            socket.create_connection(split(address), CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error)
    return None


def ask_gateway(config: Config) -> StatusReport | None:
    """The status of the OmniRelay at ``gateway.listen``; None if there is none."""

    async def ask() -> StatusReport:
        async with asyncio.timeout(STATUS_S):
            return await probe_target(config).status()

    with suppress(GatewayUnreachableError, MessageError, TimeoutError):
        return asyncio.run(ask())
    return None


def check_ports(config: Config, running: StatusReport | None) -> Findings:
    """Check that the addresses are free, or used by the OmniRelay ``running`` at ``gateway.listen``."""
    if running is not None:
        states = ", ".join(f"{stage.name} {stage.state}" for stage in running.stages)
        what = f"OmniRelay runs at {config.gateway.listen}, gateway pid {running.gateway.pid}: {states}"
        if running.ready:
            yield ok(PORTS, what)
        else:
            yield warning(PORTS, what, "wait until all are ready; a stage that is down says why in its log")
    refused, ours = 0, []
    for key, address in used(config):
        error, setting = why_not(address), key.partition(" (")[0]
        refused += error is not None
        if isinstance(error, socket.gaierror) or (error and error.errno == errno.EADDRNOTAVAIL):
            what = f"{address} ({key}) is not an address of this machine"
            yield warning(PORTS, what, "right if that process runs on another one; else correct it")
        elif error and error.errno != errno.EADDRINUSE:
            yield problem(PORTS, f"{address} ({key}) cannot be used: {error.strerror}", f"change {setting}")
        elif error and running is None and (name := our_holder(address)):
            ours.append(f"{address} ({key}: {name})")
        elif error and running is None:
            what = f"{address} ({key}) is in use{holder(address)}"
            yield problem(PORTS, what, f"stop what listens there, or set {setting} to another address")
    if ours:
        what = f"OmniRelay holds {', '.join(ours)}, but no gateway answers at {config.gateway.listen}"
        advice = "look at the log of its gateway, or stop it; another stack needs addresses of its own"
        yield problem(PORTS, what, advice)
    if not refused and running is None:
        yield ok(PORTS, "all addresses are free")


def _place(address: str) -> str:
    """A normal form: equal for addresses that collide."""
    if address.startswith("ipc://"):
        return os.path.abspath(address.removeprefix("ipc://"))
    host, port = split(address)
    return f"port {port}" if host in ANYWHERE or is_local(address) else f"{host}, port {port}"


CALLS: Final = "calls"
PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
PORTS_A_CALL: Final = 2
"""Its own, and one of the gateway's connections from the same range."""


def check_calls(config: Config) -> Findings:
    """Check packages, addresses and UDP ports of calls; no finding where they are off."""
    calls = config.gateway.webrtc
    if not calls.enabled:
        return
    try:
        version = metadata.version("aiortc")
    except metadata.PackageNotFoundError:
        what = "gateway.webrtc.enabled is set, and aiortc is not installed: the gateway will not start"
        yield problem(CALLS, what, "pip install 'omnirelay-server[webrtc]', or set it to false")
        return
    if config.gateway.http is None:
        what = "gateway.webrtc.enabled is set, and gateway.http is not: no call can be made"
        yield problem(CALLS, what, "set gateway.http")
        return
    absent = [str(each) for each in calls.addresses if not _is_ours(str(each))]
    if absent:
        what = f"not addresses of this machine: {', '.join(absent)}"
        yield problem(CALLS, what, "correct gateway.webrtc.addresses; what clients see goes into advertised")
    first, last = _port_range()
    needed = PORTS_A_CALL * calls.max_calls * max(1, len(calls.addresses))
    if last - first + 1 < needed:
        what = f"{last - first + 1} UDP ports for {calls.max_calls} calls (gateway.webrtc.max_calls)"
        yield warning(CALLS, what, f"let net.ipv4.ip_local_port_range have at least {needed}")
    elif not absent:
        where = ", ".join(map(str, calls.advertised or calls.addresses)) or "every address of this machine"
        yield ok(CALLS, f"aiortc {version}; clients must reach UDP ports {first} to {last} at {where}")


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _port_range() -> tuple[int, int]:
    first, last = PORT_RANGE.read_text(encoding="ascii").split()
    return int(first), int(last)
