"""The gateway's section of the configuration."""

from typing import Annotated, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from shared.config.values import Address, Bytes, Host, Network, Origin, Section, TcpAddress, empty_is_none

SPEECH_SYSTEM_PROMPT: Final = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory "
    "and visual inputs, as well as generating text and speech."
)
"""What the released checkpoints were trained to speak with; their chat template has another one."""

FilePath = Annotated[str | None, BeforeValidator(empty_is_none)]


class Limits(Section):
    """What the gateway admits.

    Attributes:
        max_active: Requests that the stages work on at once.
        max_queued: Requests that may wait for a place; one more is answered "busy".
        max_queued_per_client: Of those and the active ones, how many one connection may have.
        max_prompt_tokens: Longest prompt, chat template included.
        max_text_tokens: Most text tokens of one reply, and the default.
        max_codec_tokens: Most codec tokens of one reply, and the default; 50 make a second.
        request_bytes: Largest request from a client, media included.
        held_bytes: Most bytes of media that all requests together may hold; one more is answered "busy".
        client_backlog_bytes: Most bytes of answer that wait for a client that does not read.
        backlog_bytes: Most bytes of answers that wait for all clients together, before those who leave some
            unread lose theirs.
        deadline_s: A request that has not ended by then expires.
    """

    max_active: Annotated[int, Field(gt=0)] = 16
    max_queued: Annotated[int, Field(ge=0)] = 64
    max_queued_per_client: Annotated[int, Field(gt=0)] = 64
    max_prompt_tokens: Annotated[int, Field(gt=0)] = 32_768
    max_text_tokens: Annotated[int, Field(gt=0)] = 1024
    max_codec_tokens: Annotated[int, Field(gt=0)] = 4096
    request_bytes: Bytes = 100 * 2**20
    held_bytes: Bytes = 2**30
    client_backlog_bytes: Bytes = 64 * 2**20
    backlog_bytes: Bytes = 2**30
    deadline_s: Annotated[float, Field(gt=0)] = 600.0


class TlsConfig(Section):
    """TLS for clients, over TCP and over HTTP; either both files or none.

    Attributes:
        certificate: PEM file with the gateway's certificate and those between it and its authority's.
        key: PEM file with its private key, which nobody else may read.
    """

    certificate: FilePath = None
    key: FilePath = None

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.certificate is None) is not (self.key is None):
            raise ValueError("certificate and key go together: give both or none")
        return self


class GatewayConfig(Section):
    """The gateway's addresses and limits.

    Attributes:
        listen: Where clients connect, ``tcp://HOST:PORT``.
        events: Where the stages push what comes out.
        control: Where the stages connect for heartbeats and aborts.
        http: Where HTTP is served, written like the others; none switches it off.
        monitor: Where ``/livez``, ``/readyz``, ``/health`` and ``/metrics`` are served besides, without keys
            and TLS, on connections that no client can take; none switches it off.
        trusted_proxies: Addresses or networks of proxies before the gateway: what they say in
            ``X-Forwarded-For`` is believed, and shares go by the addresses named there.
        http_origins: Origins, besides the gateway's own, whose pages a browser may let use it.
        http_hosts: What HTTP requests may name as ``Host``, besides this machine and the hosts of
            ``http_origins``.  None stands for nothing else on the loopback, and for anything elsewhere.
        api_keys: File with the API keys that clients need; none asks for no key.
        tls: Certificate and key for clients' connections.
        heartbeat_timeout_s: A stage that is silent for longer counts as gone.
        orphan_timeout_s: A stage that hears nothing of the gateway for longer drops its requests.
        resume_attempts: How often a request is begun anew from what there is of its answer, after a stage was
            lost or failed; 0 lets it fail at once.
        resume_wait_s: How long a request waits for a stage that is gone.
        step_timeout_s: A stage whose loop has been in one step for longer counts as hung.
        drain_s: How long the gateway goes on with its requests once it is told to stop.
        speech_system_prompt: System message of requests that speak and bring none; none leaves that to the
            checkpoint's chat template, as for requests in text only.
        limits: What is admitted.
    """

    listen: TcpAddress = "tcp://127.0.0.1:5555"
    events: Address = "tcp://127.0.0.1:5560"
    control: Address = "tcp://127.0.0.1:5561"
    http: TcpAddress | None = "tcp://127.0.0.1:8000"
    monitor: TcpAddress | None = "tcp://127.0.0.1:5571"
    trusted_proxies: list[Network] = Field(default_factory=list)
    http_origins: list[Origin] = Field(default_factory=list)
    http_hosts: list[Host] | None = None
    api_keys: FilePath = None
    tls: TlsConfig = TlsConfig()
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 1.5
    orphan_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    resume_attempts: Annotated[int, Field(ge=0, le=100)] = 3
    resume_wait_s: Annotated[float, Field(ge=0)] = 30.0
    step_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    drain_s: Annotated[float, Field(ge=0)] = 10.0
    speech_system_prompt: Annotated[str | None, BeforeValidator(empty_is_none)] = SPEECH_SYSTEM_PROMPT
    limits: Limits = Limits()
