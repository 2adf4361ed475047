"""Addresses: all different, free or held by a running OmniRelay, not open to everybody."""

import asyncio
import errno
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from omnirelay import StatusReport
from omnirelay.errors import GatewayUnreachableError, MessageError
from ops.doctor.finding import Findings, ok, problem, warning
from ops.replicas import own_addresses
from ops.target import probe_target
from shared.config import Config
from shared.config.values import is_local
from shared.messages import STAGES

PORTS: Final = "ports"
STATUS_S: Final = 5.0
MAX_SOCKET_PATH: Final = 107
"""Of a Unix socket; the kernel takes no longer ones."""
ANYWHERE: Final = ("*", "0.0.0.0", "::")  # noqa: S104  Recognized, not used.
CLIENTS: Final = ("gateway.listen", "gateway.http")
"""Where API keys and TLS hold: :mod:`ops.doctor.access`."""
_LISTENS: Final = "0A"


def addresses(config: Config) -> Iterator[tuple[str, str]]:
    """Every address to listen on, with its key, but for ports yet to be found."""
    yield from _written(config)
    for stage in STAGES:
        for number in range(2, config.stage(stage).replicas + 1):
            for name, address in own_addresses(config, stage, number).items():
                if address is not None and not address.endswith(":*"):
                    yield f"stages.{stage}.{name} (replica {number})", address


def _written(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _written(value, f"{prefix}{name}.")
        elif name == "advertise" or (isinstance(value, str) and value.endswith(":*")):
            continue
        elif isinstance(value, str) and value.startswith(("tcp://", "ipc://")):
            yield prefix + name, value


def _used(config: Config) -> list[tuple[str, str]]:
    """The addresses of the processes that there are to be."""
    absent = tuple(f"stages.{stage}." for stage in STAGES if stage not in config.served_stages)
    return [(key, address) for key, address in addresses(config) if not key.startswith(absent)]


def check_addresses(config: Config) -> Findings:
    """Whether each socket has an address of its own, and who can reach it."""
    keys: dict[str, list[str]] = defaultdict(list)
    for key, address in _used(config):
        keys[_place(address)].append(key)
    shared = {place: names for place, names in keys.items() if len(names) > 1}
    for place, names in shared.items():
        yield problem(
            "addresses", f"{', '.join(names)} are one place, {place}", "give each a port of its own"
        )
    guarded = config.inner_addresses() if config.security.keys is not None else {}
    open_ones = [
        f"{key} {address}"
        for key, address in _used(config)
        if key not in CLIENTS and key not in guarded and not is_local(address)
    ]
    if open_ones:
        advice = "nothing asks who comes: let only a trusted network reach it"
        yield warning("addresses", f"can be reached from other machines: {', '.join(open_ones)}", advice)
    if not shared and not open_ones:
        others = ", or who has a key" if any(not is_local(each) for each in guarded.values()) else ""
        yield ok(
            "addresses", f"all are different, and only this machine can reach those of the stages{others}"
        )


def ask_gateway(config: Config) -> StatusReport | None:
    """The status of the OmniRelay that answers where clients connect; none if there is none."""

    async def ask() -> StatusReport:
        async with asyncio.timeout(STATUS_S):
            return await probe_target(config).status()

    try:
        return asyncio.run(ask())
    except (GatewayUnreachableError, MessageError, TimeoutError):
        return None


def check_ports(config: Config, running: StatusReport | None) -> Findings:
    """Whether the addresses are free, or held by a running OmniRelay.

    Args:
        config: The stack's.
        running: What answers at ``gateway.listen``.
    """
    if running is not None:
        states = ", ".join(f"{stage.name} {stage.state}" for stage in running.stages)
        what = f"OmniRelay runs at {config.gateway.listen}, gateway pid {running.gateway.pid}: {states}"
        if running.ready:
            yield ok(PORTS, what)
        else:
            yield warning(PORTS, what, "wait until all are ready; a stage that is down says why in its log")
    refused = 0
    for key, address in _used(config):
        error, setting = _why_not(address), key.partition(" (")[0]
        refused += error is not None
        if isinstance(error, socket.gaierror) or (error and error.errno == errno.EADDRNOTAVAIL):
            what = f"{address} ({key}) is not an address of this machine"
            yield warning(PORTS, what, "right if that process runs on another one; else correct it")
        elif error and error.errno != errno.EADDRINUSE:
            yield problem(PORTS, f"{address} ({key}) cannot be used: {error.strerror}", f"change {setting}")
        elif error and running is None:
            what = f"{address} ({key}) is in use{_holder(address)}"
            yield problem(PORTS, what, f"stop what listens there, or set {setting} to another address")
    if not refused and running is None:
        yield ok(PORTS, "all addresses are free")


def _why_not(address: str) -> OSError | None:
    """Why nobody could listen at an address; none if one could."""
    try:
        if address.startswith("ipc://"):
            _try_path(Path(address.removeprefix("ipc://")))
        else:
            _try_port(*_split(address))
    except OSError as error:
        return error
    except UnicodeError as error:
        # Of a name that no name server could know.
        return socket.gaierror(socket.EAI_NONAME, str(error))
    return None


def _try_port(host: str, port: int) -> None:
    if port >= 2**16:
        # Of a further replica, which counts on from the first.
        raise OSError(errno.EINVAL, "there is no such port")
    where = None if host in ANYWHERE else host
    found = socket.getaddrinfo(where, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, _, _, place = found[0]
    with closing(socket.socket(family, kind)) as probe:
        # As ZeroMQ and asyncio do: what a former process left behind is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)
        probe.listen()


def _try_path(path: Path) -> None:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise OSError(errno.ENAMETOOLONG, "the path is too long")
    if not os.access(path.parent, os.W_OK):
        raise OSError(errno.EACCES, f"{path.parent} is no directory that can be written to")
    with closing(socket.socket(socket.AF_UNIX)) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise OSError(errno.EADDRINUSE, "in use")


def _holder(address: str) -> str:
    """Who listens at an address, as far as this user may know."""
    if address.startswith("ipc://"):
        return ""
    port = f"{_split(address)[1]:04X}"
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        rows = [row.split() for row in table.read_text().splitlines()[1:]] if table.is_file() else []
        inodes |= {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port}") and row[3] == _LISTENS}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(each) in inodes for each in (process / "fd").iterdir()):
                return f" by {(process / 'comm').read_text().strip()}, pid {process.name}"
        except OSError:
            # Of another user, or gone.
            continue
    return ""


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _place(address: str) -> str:
    """An address such that two which collide are equal."""
    if address.startswith("ipc://"):
        return os.path.abspath(address.removeprefix("ipc://"))
    host, port = _split(address)
    return f"port {port}" if host in ANYWHERE or is_local(address) else f"{host}, port {port}"
