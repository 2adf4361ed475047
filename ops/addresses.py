"""The addresses that the stack listens on: which, whether they are free, who uses them."""

import argparse
import errno
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from omnirelay.errors import AddressInUseError
from omnirelay.protocol import tcp_address
from shared.config import ENV_PREFIX, MODEL_VARIABLE, Config, GatewayConfig, load_config
from shared.messages import ROLES, STAGES, Role

MAX_SOCKET_PATH: Final = 107
"""The kernel's limit for a Unix socket."""
ANYWHERE: Final = ("*", "0.0.0.0", "::")  # noqa: S104  Recognized, not used.
MODULES: Final[dict[Role, str]] = {"gateway": "gateway", **{stage: f"services.{stage}" for stage in STAGES}}
"""What each process runs, ``python -m MODULE``."""
_LISTENS: Final = "0A"
"""State of a listening socket in ``/proc/net/tcp``."""


def require_free(config: Config) -> None:
    """Check all addresses before a process is started that would fail with one.

    Raises:
        AddressInUseError: Other processes listen at some; the message names them.
    """
    taken = []
    for key, address in used(config):
        error = why_not(address)
        if error is not None and error.errno == errno.EADDRINUSE:
            taken.append(f"{address} ({key}) is in use{holder(address)}")
    if taken:
        raise AddressInUseError(
            f"{'; '.join(taken)}: stop what listens there, set other addresses in the configuration, or move "
            "all ports of this stack with `omnirelay up --port-offset 1000`"
        )


def overrides(arguments: argparse.Namespace) -> dict[str, str]:
    """Return what options say of the configuration, as environment variables for all processes.

    Raises:
        ConfigError: The configuration cannot be read, or an option has no valid value.
    """
    asked: dict[str, str] = {}
    if arguments.text_only:
        asked[f"{ENV_PREFIX}TEXT_ONLY"] = "true"
    if arguments.model is not None:
        asked[MODEL_VARIABLE] = arguments.model
    if arguments.served_model_name:
        asked[f"{ENV_PREFIX}GATEWAY__MODEL_NAMES"] = json.dumps(arguments.served_model_name)
    if arguments.port_offset:
        asked |= moved(load_config(arguments.config, os.environ | asked), arguments.port_offset)
    if arguments.host is not None or arguments.port is not None:
        http = load_config(arguments.config, os.environ | asked).gateway.http or GatewayConfig().http or ""
        host, port = split(http)
        host = host if arguments.host is None else arguments.host
        port = port if arguments.port is None else arguments.port
        asked[f"{ENV_PREFIX}GATEWAY__HTTP"] = tcp_address(host, port)
    return asked


def moved(config: Config, offset: int) -> dict[str, str]:
    """Return environment variables that move a stack: ports by ``offset``, sockets to further paths.

    The gateways of other machines move too: they are of the same stack, and started with the same offset.
    """
    given = dict(_written(config))
    for stage in STAGES:
        if (advertised := config.stage(stage).advertise) is not None:
            given[f"stages.{stage}.advertise"] = advertised
    elsewhere = {key: _moved(address, offset) for key, address in given.items()}
    gateway = config.gateway
    others = [
        {name: _moved(address, offset) for name, address in each.model_dump().items()}
        for each in gateway.others
    ]
    pages = [_moved(each, offset) for each in gateway.http_gateways]
    elsewhere |= {"gateway.others": json.dumps(others), "gateway.http_gateways": json.dumps(pages)}
    return {_variable(key): there for key, there in elsewhere.items()}


def _moved(address: str, offset: int) -> str:
    """Move an address; an origin without a port is that of a proxy, and stays."""
    if address.startswith("ipc://"):
        return f"{address}.{offset}"
    place, _, port = address.rpartition(":")
    return f"{place}:{int(port) + offset}" if port.isdecimal() else address


def addresses(config: Config) -> Iterator[tuple[str, str]]:
    """Every address to listen on, with its key; without those whose port the system chooses."""
    yield from _written(config)
    for role in ROLES:
        process, what = config.process(role), role if role == "gateway" else "replica"
        for number in range(2, process.replicas + 1):
            for name, address in process.own_addresses(number).items():
                if address is not None and not address.endswith(":*"):
                    yield f"{_section(role)}.{name} ({what} {number})", address


def variables(role: Role, values: Mapping[str, str | None]) -> dict[str, str]:
    """Environment variables that set keys of a process's section of the configuration; None is ``null``."""
    return {_variable(f"{_section(role)}.{key}"): value or "null" for key, value in values.items()}


def _section(role: Role) -> str:
    return role if role == "gateway" else f"stages.{role}"


def _variable(key: str) -> str:
    return f"{ENV_PREFIX}{key.upper().replace('.', '__')}"


def _written(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _written(value, f"{prefix}{name}.")
        elif name == "advertise" or (isinstance(value, str) and value.endswith(":*")):
            continue
        elif isinstance(value, str) and value.startswith(("tcp://", "ipc://")):
            yield prefix + name, value


def used(config: Config) -> list[tuple[str, str]]:
    """The addresses of the processes that ``omnirelay up`` starts."""
    absent = tuple(f"stages.{stage}." for stage in STAGES if stage not in config.served_stages)
    return [(key, address) for key, address in addresses(config) if not key.startswith(absent)]


def why_not(address: str) -> OSError | None:
    """Why no process could listen at an address; none if one could."""
    try:
        if address.startswith("ipc://"):
            _try_path(Path(address.removeprefix("ipc://")))
        else:
            _try_port(*split(address))
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


def holder(address: str) -> str:
    """Name the process that listens at an address, if this user may see it: `` by NAME, pid N``."""
    process = _holder(address)
    name = read_of(process, "comm").strip() if process else ""
    return f" by {name}, pid {process.name}" if process and name else ""


def our_holder(address: str) -> str | None:
    """Name the process of OmniRelay that listens at an address: ``thinker, pid N``; none if it is another."""
    if (process := _holder(address)) is None:
        return None
    command = read_of(process, "cmdline").split("\0")
    name = next((name for name, module in MODULES.items() if module in command), None)
    return f"{name}, pid {process.name}" if name else None


def read_of(process: Path, what: str) -> str:
    """What ``/proc`` tells of a process; empty if it has ended."""
    with suppress(OSError):
        return (process / what).read_text(errors="replace")
    return ""


def _holder(address: str) -> Path | None:
    """The process that listens at an address, in ``/proc``."""
    if address.startswith("ipc://"):
        return None
    port = f"{split(address)[1]:04X}"
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        rows = [row.split() for row in table.read_text().splitlines()[1:]] if table.is_file() else []
        inodes |= {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port}") and row[3] == _LISTENS}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(each) in inodes for each in (process / "fd").iterdir()):
                return process
        except OSError:
            # Of another user, or gone.
            continue
    return None


def urls(config: Config, number: int, at: Callable[[str], str] = str) -> Iterator[str]:
    """Where clients reach a gateway, with the scheme of each protocol; ``at`` moves it."""
    secure, own = config.gateway.tls.certificate is not None, config.gateway.own_addresses(number)
    for scheme, key in (("tls" if secure else "tcp", "listen"), ("https" if secure else "http", "http")):
        if (address := own[key]) is not None:
            yield at(address).replace("tcp:", f"{scheme}:", 1)


def split(address: str) -> tuple[str, int]:
    """Split a TCP address into host and port."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
