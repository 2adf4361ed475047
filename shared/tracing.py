"""Traces of requests: whether they are told to anybody, and when what happened.

OpenTelemetry is imported only if they are (:mod:`shared.otel`); docs/adr/0015 says why it is done this way.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.config import TracingConfig
    from shared.otel import Tracer

TRACES_VARIABLE: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT_VARIABLE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
DISABLED_VARIABLE: Final = "OTEL_SDK_DISABLED"
TRACES_PATH: Final = "/v1/traces"
"""Where a collector takes traces, below its base address."""
MAX_PHASES: Final = 64
"""Of one request in one process; the last one lasts until the end."""
_PRINTABLE: Final = re.compile(r"[!-~]+")

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class Phase(NamedTuple):
    """What a process did of a request for some time; begin and end in nanoseconds of Unix time."""

    name: str
    began_ns: int
    ended_ns: int


class Timeline:
    """What a process does of a request, one thing after the other.

    The wall clock is read once, at the beginning; from there on the monotonic clock counts.

    Args:
        phase: What it begins with.
    """

    __slots__ = ("_began", "_began_ns", "_phases")

    def __init__(self, phase: str) -> None:
        self._began_ns = time.time_ns()
        self._began = time.monotonic()
        self._phases = [(phase, self._began)]

    def enter(self, phase: str, at: float | None = None) -> None:
        """Go on to the next phase.

        Args:
            phase: Its name.
            at: When, in seconds of the monotonic clock; none is now.
        """
        if len(self._phases) < MAX_PHASES:
            self._phases.append((phase, self._no_earlier(at)))

    def end(self) -> list[Phase]:
        """Give all phases, the last of which ends now."""
        times = [*(began for _, began in self._phases), self._no_earlier(None)]
        at = [self._began_ns + round((each - self._began) * 1e9) for each in times]
        return [Phase(name, *each) for (name, _), each in zip(self._phases, pairwise(at), strict=True)]

    def _no_earlier(self, at: float | None) -> float:
        """Now or another moment, but not before the last phase began."""
        return max(time.monotonic() if at is None else at, self._phases[-1][1])


def check_endpoint(address: str) -> str:
    """Check the address of a collector of traces, and give it back.

    Raises:
        ValueError: It is none, or holds more than a place.  What a collector wants to know of who sends is a
            header, which OTEL_EXPORTER_OTLP_HEADERS sets.
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


def traces_url(config: "TracingConfig", environment: Mapping[str, str]) -> str | None:
    """Give the address that spans are posted to; none if there are to be no traces.

    Args:
        config: What the configuration says; its endpoint goes before those of the environment.
        environment: Where OpenTelemetry's own variables are looked up.

    Raises:
        ConfigError: A variable holds no address.
    """
    if environment.get(DISABLED_VARIABLE, "").strip().lower() == "true":
        return None
    if config.endpoint is not None:
        return config.endpoint if config.endpoint.endswith(TRACES_PATH) else _below(config.endpoint)
    # As OpenTelemetry has it: this one is the whole address, the other what all signals have in common.
    if url := _address(environment, TRACES_VARIABLE):
        return url
    base = _address(environment, ENDPOINT_VARIABLE)
    return _below(base) if base else None


def open_tracer(config: "TracingConfig", process: str) -> "Tracer | None":
    """Begin to tell traces, if the configuration or the environment says where; else there is none.

    Args:
        config: What the configuration says.
        process: Which process this is: a stage, or ``gateway``.

    Raises:
        ConfigError: A variable of OpenTelemetry holds what cannot be used.
    """
    url = traces_url(config, os.environ)
    if url is None:
        return None
    from shared.otel import Tracer  # noqa: PLC0415 - a process without traces need not load it

    return Tracer(process, url, config.sample_ratio)


def _address(environment: Mapping[str, str], name: str) -> str | None:
    value = environment.get(name, "").strip()
    if not value:
        return None
    try:
        return check_endpoint(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _below(base: str) -> str:
    return base.rstrip("/") + TRACES_PATH
