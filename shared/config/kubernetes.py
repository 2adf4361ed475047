"""Variables that Kubernetes sets for the Services of a namespace; they are not configuration.

A Service ``omnirelay`` gives every container ``OMNIRELAY_PORT=tcp://10.0.0.7:8000``, and a Service
``omnirelay-gateway`` gives ``OMNIRELAY_GATEWAY_SERVICE_HOST``.  Both name and value are checked, so that
misspelled keys are still errors.
"""

import ipaddress
import re
from collections.abc import Callable
from typing import Final

_SERVICE: Final = r"OMNIRELAY(?:_[A-Z0-9]+)*"
_PROTOCOLS: Final = ("tcp", "udp", "sctp")
_URL: Final = re.compile(r"([a-z]+)://(.+):([0-9]+)")


def _is_address(value: str) -> bool:
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return False
    # Services never have an address to listen on.
    return not (address.is_loopback or address.is_unspecified)


def _is_port(value: str) -> bool:
    return value.isascii() and value.isdecimal() and 0 < int(value[:6]) < 2**16


def _is_url(value: str) -> bool:
    found = _URL.fullmatch(value)
    return found is not None and (
        found[1] in _PROTOCOLS and _is_address(found[2].strip("[]")) and _is_port(found[3])
    )


_SHAPES: Final[tuple[tuple[re.Pattern[str], Callable[[str], bool]], ...]] = tuple(
    (re.compile(f"{_SERVICE}_{suffix}"), check)
    for suffix, check in (
        ("SERVICE_HOST", _is_address),
        ("SERVICE_PORT(?:_[A-Z0-9]+)*", _is_port),
        ("PORT(?:_[0-9]+_(?:TCP|UDP|SCTP))?", _is_url),
        ("PORT_[0-9]+_(?:TCP|UDP|SCTP)_PROTO", lambda value: value in _PROTOCOLS),
        ("PORT_[0-9]+_(?:TCP|UDP|SCTP)_PORT", _is_port),
        ("PORT_[0-9]+_(?:TCP|UDP|SCTP)_ADDR", _is_address),
    )
)


def is_for_a_service(name: str, value: str) -> bool:
    """Whether Kubernetes could have set the variable."""
    return any(pattern.fullmatch(name) and check(value) for pattern, check in _SHAPES)
