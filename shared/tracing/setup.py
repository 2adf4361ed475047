"""Whether and where traces are exported.

OpenTelemetry is imported only if they are (:mod:`shared.tracing.otel`); docs/adr/0015 says why.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from omnirelay.errors import ConfigError
from shared.config import TracingConfig
from shared.config.values import check_endpoint

if TYPE_CHECKING:
    from shared.tracing.otel import Tracer

TRACES_VARIABLE: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT_VARIABLE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
DISABLED_VARIABLE: Final = "OTEL_SDK_DISABLED"
TRACES_PATH: Final = "/v1/traces"
"""The path of traces below a collector's base address."""


def traces_url(config: TracingConfig, environment: Mapping[str, str]) -> str | None:
    """The address that spans are posted to: the configuration's, or OpenTelemetry's variables; None if unset.

    Raises:
        ConfigError: A variable holds no address.
    """
    if environment.get(DISABLED_VARIABLE, "").strip().lower() == "true":
        return None
    if config.endpoint is not None:
        return _below(config.endpoint.rstrip("/").removesuffix(TRACES_PATH))
    # By OpenTelemetry's convention this is the whole address, the other the base of all signals.
    if url := _address(environment, TRACES_VARIABLE):
        return url
    base = _address(environment, ENDPOINT_VARIABLE)
    return _below(base) if base else None


def open_tracer(config: TracingConfig, process: str) -> "Tracer | None":
    """The tracer of a process (a stage, or ``gateway``); None if no collector is configured.

    Raises:
        ConfigError: One of OpenTelemetry's variables has an invalid value.
    """
    url = traces_url(config, os.environ)
    if url is None:
        return None
    from shared.tracing.otel import Tracer  # noqa: PLC0415 - a process without traces need not load it

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
