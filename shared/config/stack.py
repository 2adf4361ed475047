"""The whole configuration: its sections, and the rules that join them."""

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from shared.config.cluster import ClusterConfig, StagePlace
from shared.config.gateway import GatewayConfig
from shared.config.media import MediaConfig
from shared.config.stages import StageConfig, StagesConfig
from shared.config.values import Section, TraceEndpoint, empty_is_none, is_local
from shared.log.form import LogFormat
from shared.messages import STAGES, Role, StageName
from shared.messages.payloads import DEFAULT_WINDOW_BYTES

DEFAULT_CHECKPOINT: Final = Path(".cache/omnirelay/speaking")
"""The small trained checkpoint that is served when no model is set."""


class SecurityConfig(Section):
    """Who may connect to the sockets between the processes.

    Attributes:
        keys: Directory of the files that ``omnirelay keys`` makes. Encrypts and authenticates all sockets
            between the processes. For all processes, or none.
        internal_network: Declares that nothing but the stack is on the network of these addresses.
    """

    keys: Annotated[str | None, BeforeValidator(empty_is_none)] = None
    internal_network: bool = False


class TracingConfig(Section):
    """Whether and where traces are exported.

    Attributes:
        endpoint: OTLP/HTTP collector for traces, like ``http://127.0.0.1:4318``. Default: OpenTelemetry's
            variables; without them no traces. See docs/traces.md#traces and
            docs/traces.md#opentelemetrys-variables.
        sample_ratio: Share of traced requests, from 0 to 1. A client's ``traceparent`` overrides it.
    """

    endpoint: Annotated[TraceEndpoint | None, BeforeValidator(empty_is_none)] = None
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0


class Config(Section):
    """The whole stack.

    Attributes:
        model: Directory of the checkpoint, or its id on the Hugging Face hub. Default: the trained
            checkpoint, which ``omnirelay up`` and ``demo`` write to ``.cache/omnirelay/speaking``. See
            docs/training.md.
        revision: Commit, branch or tag of a checkpoint from the hub. Default: ``main``.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
        log_format: Form of log lines: ``text``, or ``json``, one object per line. See docs/traces.md#logs.
        text_only: Only the thinker serves, without speech. See docs/operations.md#text-only.
        share_gpus: Stages on one GPU divide its memory; all must be on this machine. ``omnirelay up`` and
            ``compose.gpu.yaml`` set it. See docs/models.md#one-gpu.
        window_bytes: Most bytes in flight from one process to another (credits). At least 1 MiB. See
            docs/architecture.md#credits.
    """

    model: str | None = None
    revision: Annotated[str | None, BeforeValidator(empty_is_none)] = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"
    text_only: bool = False
    share_gpus: bool = False
    window_bytes: Annotated[int, Field(ge=2**20)] = DEFAULT_WINDOW_BYTES
    gateway: GatewayConfig = GatewayConfig()
    media: MediaConfig = MediaConfig()
    security: SecurityConfig = SecurityConfig()
    stages: StagesConfig = StagesConfig()
    tracing: TracingConfig = TracingConfig()
    cluster: ClusterConfig = ClusterConfig()

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
                f"other machines can reach {', '.join(reachable)}, and could join the stack: "
                "make keys with `omnirelay keys DIR` and set security.keys to DIR; or set "
                "security.internal_network: true if only the processes of the stack are on that network"
            )
        return self

    def inner_addresses(self) -> dict[str, str]:
        """The addresses of the sockets between the processes, by key."""
        found = {"gateway.events": self.gateway.events, "gateway.control": self.gateway.control}
        for index, other in enumerate(self.gateway.others):
            found[f"gateway.others.{index}.events"] = other.events
            found[f"gateway.others.{index}.control"] = other.control
        for name in STAGES:
            stage = self.stage(name)
            found[f"stages.{name}.inbox"] = stage.inbox
            if stage.advertise is not None:
                found[f"stages.{name}.advertise"] = stage.advertise
        return found

    @property
    def served_stages(self) -> tuple[StageName, ...]:
        """The stages of the stack, in the order data flows."""
        return STAGES[:1] if self.text_only else STAGES

    @property
    def roles(self) -> tuple[Role, ...]:
        """The gateway and the served stages."""
        return "gateway", *self.served_stages

    def stage(self, name: StageName) -> StageConfig:
        """The configuration of one stage."""
        stage: StageConfig = getattr(self.stages, name)
        return stage

    def process(self, role: Role) -> GatewayConfig | StageConfig:
        """The configuration of the gateway, or of one stage."""
        return self.gateway if role == "gateway" else self.stage(role)

    def place(self, name: StageName) -> StagePlace:
        """What a replica of one stage needs of a node in a cluster."""
        place: StagePlace = getattr(self.cluster, name)
        return place
