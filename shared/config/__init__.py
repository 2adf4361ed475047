"""Configuration: one YAML file, environment overrides, a strict schema.

Every process of the stack reads the same file.  A value may be overridden by an environment variable
named ``OMNIRELAY_`` and the path of the key, joined by two underscores
(``OMNIRELAY_GATEWAY__LISTEN=tcp://0.0.0.0:5555``); ``OMNI_MODEL`` chooses the checkpoint.
Unknown keys are refused, but for what Kubernetes sets for Services.  No value is ever imported or executed.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from omnirelay.errors import ConfigError
from omnirelay.values import API_KEY_VARIABLE
from shared.config.gateway import GatewayConfig, Limits, TlsConfig
from shared.config.kubernetes import is_for_a_service
from shared.config.media import MediaConfig
from shared.config.security import SecurityConfig
from shared.config.stages import (
    EngineConfig,
    StageConfig,
    StagesConfig,
    SynthesisConfig,
    SynthesisEngineConfig,
    TalkerConfig,
    ThinkerConfig,
    ThinkerEngineConfig,
    Token2WavConfig,
)
from shared.config.values import Section, TraceEndpoint, empty_is_none, is_local
from shared.log import LogFormat
from shared.messages import STAGES, StageName
from shared.messages.bounds import DEFAULT_WINDOW_BYTES

__all__ = [
    "DEFAULT_CHECKPOINT",
    "ENV_PREFIX",
    "MODEL_VARIABLE",
    "NOT_YAML",
    "Config",
    "EngineConfig",
    "GatewayConfig",
    "Limits",
    "MediaConfig",
    "SecurityConfig",
    "StageConfig",
    "StagesConfig",
    "SynthesisConfig",
    "SynthesisEngineConfig",
    "TalkerConfig",
    "ThinkerConfig",
    "ThinkerEngineConfig",
    "TlsConfig",
    "Token2WavConfig",
    "TracingConfig",
    "load_config",
    "tell_ignored",
]

ENV_PREFIX = "OMNIRELAY_"
MODEL_VARIABLE = "OMNI_MODEL"
DEFAULT_CHECKPOINT = Path(".cache/omnirelay/tiny")
"""Where the small random checkpoint is kept that serves when no model is chosen."""


REMOVED: Final = {
    "stages.talker.prompt_mode": "was removed: every prompt is computed as the released weights were trained",
}
"""Keys that there were, and what became of them."""
NOT_YAML: Final = (
    yaml.YAMLError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    TypeError,
    RecursionError,
)
"""What PyYAML raises: its own error, and whatever escapes it, as for ``2024-99-99`` or ``!!bool x``."""


log = logging.getLogger(__name__)


class TracingConfig(Section):
    """Whether and where traces of requests are told.

    Attributes:
        endpoint: A collector that speaks OTLP over HTTP, or the address below it that takes traces; none
            leaves it to OpenTelemetry's environment variables.
        sample_ratio: Share of the requests that are traced, unless the client decides.
    """

    endpoint: Annotated[TraceEndpoint | None, BeforeValidator(empty_is_none)] = None
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0


class Config(Section):
    """The whole stack.

    Attributes:
        model: Directory of the checkpoint, or its id on the Hugging Face hub; none is the small random
            checkpoint in :data:`DEFAULT_CHECKPOINT`.
        log_level: Of OmniRelay's own log lines.
        log_format: How all processes write their lines: for people, or one JSON object a line.
        text_only: The thinker serves alone: answers are not spoken, and there are no talker and token2wav.
        window_bytes: Most bytes on the way from one process to another: sent, and not yet taken from the
            socket.  A message that is larger goes alone.
        gateway: The gateway.
        media: Sounds, pictures and videos of requests.
        security: Who may join the stack.
        stages: The stages.
        tracing: Traces of requests.
    """

    model: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"
    text_only: bool = False
    window_bytes: Annotated[int, Field(ge=2**20)] = DEFAULT_WINDOW_BYTES
    gateway: GatewayConfig = GatewayConfig()
    media: MediaConfig = MediaConfig()
    security: SecurityConfig = SecurityConfig()
    stages: StagesConfig = StagesConfig()
    tracing: TracingConfig = TracingConfig()

    @model_validator(mode="after")
    def _media_fit_the_sockets(self) -> Self:
        if self.media.max_item_bytes > self.stages.thinker.max_payload_bytes:
            raise ValueError("media.max_item_bytes must not exceed stages.thinker.max_payload_bytes")
        if self.media.max_request_bytes > self.gateway.limits.request_bytes:
            raise ValueError("media.max_request_bytes must not exceed gateway.limits.request_bytes")
        if self.media.max_request_bytes > self.gateway.limits.held_bytes:
            raise ValueError("media.max_request_bytes must not exceed gateway.limits.held_bytes")
        return self

    @model_validator(mode="after")
    def _strangers_stay_outside(self) -> Self:
        if self.security.keys is not None or self.security.internal_network:
            return self
        reachable = [
            f"{key} {address}" for key, address in self.inner_addresses().items() if not is_local(address)
        ]
        if reachable:
            raise ValueError(
                f"other machines can reach {', '.join(reachable)}, and whoever does could join the stack: "
                "make keys with `omnirelay keys DIR` and set security.keys to DIR; or set "
                "security.internal_network: true if nobody but the processes of the stack is on that network"
            )
        return self

    def inner_addresses(self) -> dict[str, str]:
        """The addresses of the sockets between the processes, by their keys."""
        found = {"gateway.events": self.gateway.events, "gateway.control": self.gateway.control}
        for name in STAGES:
            stage = self.stage(name)
            found[f"stages.{name}.inbox"] = stage.inbox
            if stage.advertise is not None:
                found[f"stages.{name}.advertise"] = stage.advertise
        return found

    @property
    def served_stages(self) -> tuple[StageName, ...]:
        """The stages that the stack has, in the order data flows."""
        return STAGES[:1] if self.text_only else STAGES

    def stage(self, name: StageName) -> StageConfig:
        """The configuration of one stage."""
        stage: StageConfig = getattr(self.stages, name)
        return stage


def load_config(path: Path | None = None, environment: dict[str, str] | None = None) -> Config:
    """Read the configuration.

    Args:
        path: The YAML file; none starts from the defaults.
        environment: Where overrides are looked up; none is the process's environment.

    Raises:
        ConfigError: The file cannot be read, or a key or value is not allowed; all problems are listed.
    """
    environment = dict(os.environ) if environment is None else environment
    source = str(path) if path else "the built-in configuration"
    values = _read_yaml(path) if path else {}
    _apply_overrides(values, environment)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        found = [(".".join(str(part) for part in item["loc"]), item["msg"]) for item in error.errors()]
        problems = "; ".join(
            f"{key} {REMOVED[key]}" if key in REMOVED else f"{key}: {problem}" for key, problem in found
        )
        raise ConfigError(f"{source} (with environment overrides): {problems}") from error


def tell_ignored(environment: Mapping[str, str] = os.environ) -> None:
    """Write to the log which variables with our prefix say nothing, as Kubernetes sets them."""
    if ignored := sorted(name for name, text in environment.items() if is_for_a_service(name, text)):
        log.info("ignored, as Kubernetes sets them for Services: %s", ", ".join(ignored))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except NOT_YAML as error:
        raise ConfigError(f"{path} is not YAML: {_in_one_line(error)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, not a {type(values).__name__}")
    return values


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _apply_overrides(values: dict[str, Any], environment: dict[str, str]) -> None:
    """Write the environment's overrides into the mapping; scalars are read as YAML."""
    if model := environment.get(MODEL_VARIABLE):
        values["model"] = model
    for name, text in environment.items():
        if not name.startswith(ENV_PREFIX) or name == API_KEY_VARIABLE or is_for_a_service(name, text):
            continue
        *sections, key = name.removeprefix(ENV_PREFIX).lower().split("__")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{name}: {part} is a value, not a section")
        try:
            section[key] = yaml.safe_load(text)
        except NOT_YAML as error:
            raise ConfigError(f"{name}={text!r} is not a YAML value: {_in_one_line(error)}") from error
