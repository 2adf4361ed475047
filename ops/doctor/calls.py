"""Check that calls by WebRTC can be taken, where they are enabled."""

import socket
from importlib import metadata
from pathlib import Path
from typing import Final

from ops.doctor.finding import Findings, ok, problem, warning
from shared.config import Config

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
