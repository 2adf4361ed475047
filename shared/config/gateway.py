"""The gateway's section of the configuration."""

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
    further,
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
    """Limits on requests.

    Attributes:
        max_connections: Connections of clients over TCP, and as many over HTTP. One address gets less. See
            docs/security.md#what-a-client-can-hold-without-a-key.
        max_active: Requests at the thinker at once, and as many with speech. Default: what the replicas
            compute at once.
        max_queued: Queued requests. One more is answered ``busy``.
        max_queued_per_client: Open requests of one connection. One more is answered ``busy``.
        max_prompt_tokens: Longest prompt, chat template included.
        early_prompt_tokens: Most prompt tokens computed early for a client between two requests. See
            docs/api-realtime.md#events.
        max_text_tokens: Most text tokens of a reply, and the default.
        max_codec_tokens: Most codec frames of a reply, and the default: 50 a second with Qwen2.5-Omni, 12.5
            with Qwen3-Omni.
        request_bytes: Largest frame and largest HTTP body, media included.
        held_bytes: Most bytes of media of all open requests, else ``busy``. Requests over 256 KiB in progress
            have as much again. See docs/protocol.md#frames.
        realtime_resume_bytes: Events kept for a session that can resume: a minute of PCM. Part of
            ``held_bytes``.
        client_backlog_bytes: Most unread bytes of answers on one connection.
        backlog_bytes: Beyond so many unread bytes of all clients, one with over 1 MiB unread loses its
            request.
        deadline_s: Deadline of a request. A request may ask for less.
    """

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
    """TLS for clients, over TCP and HTTP: both files or none.

    Attributes:
        certificate: PEM file with the certificate chain. With it, ``listen`` and ``http`` speak TLS 1.2 or
            later only.
        key: PEM file with its private key, without a password, readable by its owner only (by a group if root
            owns it).
    """

    certificate: FilePath = None
    key: FilePath = None

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.certificate is None) is not (self.key is None):
            raise ValueError("certificate and key go together: give both or none")
        return self


class WebRtcConfig(Section):
    """Calls by WebRTC; needs the extra ``webrtc``.

    Attributes:
        enabled: Takes calls by WebRTC. Needs ``pip install 'omnirelay-server[webrtc]'`` and UDP ports. See
            docs/calls.md.
        addresses: This machine's addresses for calls, at most 8. Default: all but the loopback's.
        advertised: Addresses that answers name instead, with the same ports, for a gateway behind NAT. At
            most 8.
        max_calls: Calls at once. One client may have four fifths. See docs/calls.md#set-up.
        max_call_s: The longest call.
    """

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
    """The gateway's addresses, access rules, timeouts and limits.

    Attributes:
        listen: Where clients connect by TCP.
        events: Where stages push text, codec ids, audio and failures.
        control: Where stages connect for heartbeats and aborts.
        replicas: Gateways that ``omnirelay up`` and ``cluster`` start, at most 16, each 100 ports higher
            (``ipc://PATH.2``, …). See docs/replicas.md#several-gateways.
        others: Further gateways for the stages, at most 16, like ``{events: "tcp://10.0.0.2:5560", control:
            "tcp://10.0.0.2:5561"}``. A host name stands for all its IPv4 addresses. Read again on SIGHUP. See
            docs/replicas.md#several-gateways.
        http: Where HTTP is served. ``null``: nowhere. See docs/api.md.
        monitor: Where metrics and health are served, without keys and TLS. ``null``: nowhere. See
            docs/metrics.md.
        trusted_proxies: Addresses or networks of proxies, like ``10.0.0.0/8``, whose ``X-Forwarded-For``
            counts. See docs/access.md#browsers.
        http_origins: Origins, like ``https://chat.example.com``, whose pages may use the gateway. See
            docs/access.md#browsers.
        http_hosts: Accepted ``Host``s, without port. Default: on the loopback ``localhost``, loopback
            addresses and hosts of ``http_origins``; elsewhere any. See docs/access.md#browsers.
        http_gateways: Origins of all gateways, this one included, for pages that lose theirs. They count as
            ``http_origins``. Default: the gateways of ``omnirelay up``.
        api_keys: File with hashes and limits of clients' API keys. Default: no key is needed. See
            docs/access.md#make-a-key.
        share_prefix_cache: Holders of different API keys share the thinker's caches: faster, but it tells
            what others sent. See docs/security.md#prompts-of-others-in-the-prefix-cache.
        heartbeat_timeout_s: A replica that is silent for longer is down (more with over 32 replicas). See
            docs/lifecycle.md#heartbeats.
        orphan_timeout_s: A replica drops the requests of a gateway that is silent for longer.
        resume_attempts: How often a request is resumed. See docs/lifecycle.md#attempts.
        resume_wait_s: How long a request waits for a stage without replicas, within its deadline.
        step_timeout_s: A replica that is in one step of its loop for longer is down.
        drain_s: How long a stopped gateway continues its requests. See docs/operations.md#start-and-stop.
        realtime_resume_s: How long a realtime session waits for its client to resume, at most 600. ``0``: not
            at all. See docs/api-realtime.md#a-session-outlives-its-connection.
        max_start_delay_s: Longest advised start delay, at most 60. ``0``: none. See
            docs/stages.md#the-start-delay.
        speech_system_prompt: System message of requests for speech without one. ``auto``: the one that
            released checkpoints need; with Qwen2.5-Omni ``You are Qwen, a virtual human developed by the Qwen
            Team, Alibaba Group, capable of perceiving auditory and visual inputs, as well as generating text
            and speech.`` ``null``: the chat template's.
        turn_model: Weights of Smart Turn v3 for ``semantic_vad``: an ONNX file, or ``auto`` for that of an
            installed ``pipecat-ai``. Needs ``pip install 'omnirelay-server[turns]'``. See
            docs/api-realtime.md#the-end-of-a-turn-heard.
        model_names: Further names for the model, such as ``tts-1`` and ``whisper-1``.
        voice_aliases: Further names for voices, ``{name: voice}``. Default: OpenAI's, for Chelsie (alloy,
            coral, fable, marin, nova, sage, shimmer) and Ethan (ash, ballad, cedar, echo, onyx, verse). An
            alias of a missing voice means the default voice.
    """

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
    resume_wait_s: Annotated[float, Field(ge=0)] = 180.0
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
        return {key: address and further(address, number, PORTS_APART) for key, address in given.items()}

    @property
    def addresses(self) -> list[GatewayAddresses]:
        """Where the stages reach the gateways, each once."""
        ours = [
            GatewayAddresses(events=own["events"] or "", control=own["control"] or "")
            for own in map(self.own_addresses, range(1, self.replicas + 1))
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
