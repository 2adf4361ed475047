"""The gateway's section of the configuration.  docs/configuration.md describes every key."""

from typing import Annotated, Final, Self

from pydantic import BeforeValidator, Field, IPvAnyAddress, model_validator

from omnirelay.values import MAX_START_DELAY_S
from shared.config.values import (
    Address,
    Bytes,
    Host,
    Network,
    Origin,
    Section,
    TcpAddress,
    check_address,
    empty_is_none,
)

AUTO: Final = "auto"
"""What the checkpoint's family has, or what is installed."""

READ_PROMPT: Final = "Read the text aloud."
"""The user's message before a text that is spoken as it is."""

MAX_GATEWAYS: Final = 16
"""Most gateways of one stack."""
PORTS_APART: Final = 100
"""Distance of the ports of a further gateway on the same machine from those of the one before."""

Voice = Annotated[str, Field(min_length=1, max_length=128)]
ModelName = Voice
FilePath = Annotated[str | None, BeforeValidator(empty_is_none)]


class Limits(Section):
    """Limits on requests."""

    max_connections: Annotated[int, Field(gt=0)] = 512
    max_active: Annotated[int, Field(gt=0)] | None = None
    max_queued: Annotated[int, Field(ge=0)] = 64
    max_queued_per_client: Annotated[int, Field(gt=0)] = 64
    max_prompt_tokens: Annotated[int, Field(gt=0)] = 32_768
    early_prompt_tokens: Annotated[int, Field(ge=0)] = 32_768
    max_text_tokens: Annotated[int, Field(gt=0)] = 1024
    max_codec_tokens: Annotated[int, Field(gt=0)] = 4096
    request_bytes: Bytes = 100 * 2**20
    held_bytes: Bytes = 2**30
    realtime_resume_bytes: Bytes = 4 * 2**20
    client_backlog_bytes: Bytes = 64 * 2**20
    backlog_bytes: Bytes = 2**30
    deadline_s: Annotated[float, Field(gt=0)] = 600.0


class TlsConfig(Section):
    """TLS for clients, over TCP and HTTP: both files or none."""

    certificate: FilePath = None
    key: FilePath = None

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.certificate is None) is not (self.key is None):
            raise ValueError("certificate and key go together: give both or none")
        return self


class WebRtcConfig(Section):
    """Calls by WebRTC; needs the extra ``webrtc``."""

    enabled: bool = False
    addresses: list[IPvAnyAddress] = Field(default_factory=list, max_length=8)
    advertised: list[IPvAnyAddress] = Field(default_factory=list, max_length=8)
    max_calls: Annotated[int, Field(gt=0)] = 10
    max_call_s: Annotated[float, Field(gt=0)] = 3600.0


class GatewayAddresses(Section):
    """Where the stages reach a gateway."""

    events: Address
    control: Address


class GatewayConfig(Section):
    """The gateway's addresses, access rules, timeouts and limits."""

    listen: TcpAddress = "tcp://127.0.0.1:5555"
    events: Address = "tcp://127.0.0.1:5560"
    control: Address = "tcp://127.0.0.1:5561"
    replicas: Annotated[int, Field(gt=0, le=MAX_GATEWAYS)] = 1
    others: list[GatewayAddresses] = Field(default_factory=list, max_length=MAX_GATEWAYS)
    http: TcpAddress | None = "tcp://127.0.0.1:8000"
    monitor: TcpAddress | None = "tcp://127.0.0.1:5571"
    trusted_proxies: list[Network] = Field(default_factory=list)
    http_origins: list[Origin] = Field(default_factory=list)
    http_hosts: list[Host] | None = None
    http_gateways: list[Origin] = Field(default_factory=list, max_length=MAX_GATEWAYS)
    api_keys: FilePath = None
    share_prefix_cache: bool = False
    tls: TlsConfig = TlsConfig()
    webrtc: WebRtcConfig = WebRtcConfig()
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 1.5
    orphan_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    resume_attempts: Annotated[int, Field(ge=0, le=100)] = 3
    resume_wait_s: Annotated[float, Field(ge=0)] = 30.0
    step_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    drain_s: Annotated[float, Field(ge=0)] = 10.0
    realtime_resume_s: Annotated[float, Field(ge=0, le=600)] = 30.0
    max_start_delay_s: Annotated[float, Field(ge=0, le=MAX_START_DELAY_S)] = 5.0
    speech_system_prompt: Annotated[str | None, BeforeValidator(empty_is_none)] = AUTO
    turn_model: FilePath = None
    model_names: list[ModelName] = Field(default_factory=list, max_length=100)
    voice_aliases: Annotated[dict[Voice, Voice] | None, Field(max_length=1000)] = None
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _ports_exist(self) -> Self:
        for key, address in self.own_addresses(self.replicas).items():
            if address is not None:
                try:
                    check_address(address)
                except ValueError as error:
                    raise ValueError(f"{key} of gateway {self.replicas}: {error}") from error
        return self

    def own_addresses(self, number: int) -> dict[str, str | None]:
        """The addresses of the gateway of a number, from 1, on this machine, by key."""
        keys = ("listen", "events", "control", "http", "monitor")
        given: dict[str, str | None] = {key: getattr(self, key) for key in keys}
        return {key: address and _further(address, number) for key, address in given.items()}

    @property
    def addresses(self) -> list[GatewayAddresses]:
        """Where the stages reach the gateways, each once."""
        ours = [
            GatewayAddresses(events=_further(self.events, number), control=_further(self.control, number))
            for number in range(1, self.replicas + 1)
        ]
        return list({each.control: each for each in [*ours, *self.others]}.values())

    @property
    def page_origins(self) -> list[str]:
        """Where a browser finds the gateways: a page that loses its own goes on at the next."""
        if self.http_gateways or self.http is None or self.replicas == 1:
            return self.http_gateways
        scheme = "http" if self.tls.certificate is None else "https"
        addresses = [self.own_addresses(number)["http"] or "" for number in range(1, self.replicas + 1)]
        return [
            f"{scheme}://{host}:{address.rpartition(':')[2]}"
            for host in ("127.0.0.1", "localhost")
            for address in addresses
        ]


def _further(address: str, number: int) -> str:
    """The address of a further gateway that corresponds to the first one's."""
    if number == 1:
        return address
    if address.startswith("ipc://"):
        return f"{address}.{number}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + PORTS_APART * (number - 1)}"
