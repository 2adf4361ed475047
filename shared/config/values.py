"""Types of configuration values: addresses, origins, hosts, sizes."""

import ipaddress
import re
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Bytes = Annotated[int, Field(gt=0)]

_PRINTABLE: Final = re.compile(r"[!-~]+")
_ORIGIN = re.compile(r"https?://[a-z0-9.\[\]:-]+")
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:]*:[0-9a-f:.]+")


def check_address(address: str) -> str:
    """Return an address; raise ValueError if it is not one."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return address
    host, _, port = rest.rpartition(":")
    written_well = address.isascii() and not any(character.isspace() for character in address)
    if scheme != "tcp" or not written_well or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"{address!r} is not tcp://HOST:PORT (nor ipc://PATH)")
    return address


WILDCARDS: Final = ("*", "0.0.0.0", "[::]")  # noqa: S104 - nothing is bound here
"""Hosts that stand for all addresses of the machine; nobody can connect to them."""


def host_of(address: str) -> str:
    """The host of a valid address of TCP, an IPv6 one in brackets."""
    return address.removeprefix("tcp://").rpartition(":")[0]


def further(address: str, number: int, apart: int) -> str:
    """The address of a process of a number, from 1, by the first one's; ports are so far ``apart``."""
    if number == 1:
        return address
    if address.startswith("ipc://"):
        return f"{address}.{number}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + apart * (number - 1)}"


def check_reachable(address: str) -> str:
    """Return an address; raise ValueError if others cannot connect to it."""
    if host_of(address) in WILDCARDS:
        raise ValueError(f"{address!r} stands for all addresses of a machine; nobody can connect to it")
    return check_address(address)


def _check_inbox(address: str) -> str:
    # The system chooses the port; heartbeats report it.
    check_address(f"{address.removesuffix('*')}1" if address.endswith(":*") else address)
    return address


def _check_tcp(address: str) -> str:
    if not address.startswith("tcp://"):
        raise ValueError(f"{address!r} is not tcp://HOST:PORT")
    return address


def is_local(address: str) -> bool:
    """Whether only this machine can reach an address: ``ipc://``, ``localhost``, or one of the loopback.

    Host names and wildcards are not local.
    """
    if address.startswith("ipc://"):
        return True
    host = host_of(address)
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


Address = Annotated[str, AfterValidator(check_address)]
InboxAddress = Annotated[str, AfterValidator(_check_inbox)]
ReachableAddress = Annotated[str, AfterValidator(check_reachable)]
TcpAddress = Annotated[Address, AfterValidator(_check_tcp)]


def _check_origin(origin: str) -> str:
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{origin!r} is not http[s]://HOST[:PORT] in lower case, without a path")
    return origin


def check_endpoint(address: str) -> str:
    """Return the address of a trace collector.

    Raises:
        ValueError: It is invalid or holds credentials, which belong into OTEL_EXPORTER_OTLP_HEADERS.
    """
    wrong = f"{address!r} is not http://HOST:PORT or https://HOST:PORT, with a path or without"
    try:
        parts = urlsplit(address)
        well_placed = parts.hostname and parts.port != 0
    except ValueError as error:
        raise ValueError(wrong) from error
    more = parts.username is not None or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not well_placed or more or not _PRINTABLE.fullmatch(address):
        raise ValueError(wrong)
    return address


Origin = Annotated[str, AfterValidator(_check_origin)]
TraceEndpoint = Annotated[str, AfterValidator(check_endpoint)]


def empty_is_none(value: object) -> object:
    """An empty value, as an unset variable in Compose gives, is None."""
    return None if value == "" else value


def _check_host(host: str) -> str:
    if not _HOST.fullmatch(host):
        raise ValueError(f"{host!r} is not a name or an address in lower case, without a port and brackets")
    return host


Host = Annotated[str, AfterValidator(_check_host)]


def _check_network(network: str) -> str:
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        raise ValueError(f"{network!r} is not an address, nor a network such as 10.0.0.0/8") from error
    return network


Network = Annotated[str, AfterValidator(_check_network)]


def _device_number(devices: object) -> object:
    """YAML reads a single device, ``devices: 0``, as a number."""
    return str(devices) if type(devices) is int else devices


DeviceList = Annotated[str, BeforeValidator(_device_number)]


class Section(BaseModel):
    """A section of the configuration: strict and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
