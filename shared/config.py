"""Configuration: one YAML file, environment overrides, a strict schema.

Every process of the stack reads the same file.  A value may be overridden by an environment variable
named ``OMNIRELAY_`` and the path of the key, joined by two underscores
(``OMNIRELAY_GATEWAY__LISTEN=tcp://0.0.0.0:5555``); ``OMNI_MODEL`` chooses the checkpoint.
Unknown keys are refused.  No value is ever imported or executed.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from shared.errors import ConfigError
from shared.messages import MAX_MEDIA_ITEMS, StageName
from shared.tracing import check_endpoint
from shared.wire import DEFAULT_MAX_PAYLOAD_BYTES

ENV_PREFIX = "OMNIRELAY_"
MODEL_VARIABLE = "OMNI_MODEL"
DEFAULT_CHECKPOINT = Path(".cache/omnirelay/tiny")
"""Where the small random checkpoint is kept that serves when no model is chosen."""

Bytes = Annotated[int, Field(gt=0)]

_ORIGIN = re.compile(r"https?://[a-z0-9.\[\]:-]+")
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:]*:[0-9a-f:.]+")
_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""What PyYAML raises: its own error, and whatever escapes it, as for ``2024-99-99`` or ``!!bool x``."""


def _check_address(address: str) -> str:
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return address
    host, _, port = rest.rpartition(":")
    written_well = address.isascii() and not any(character.isspace() for character in address)
    if scheme != "tcp" or not written_well or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"{address!r} is not tcp://HOST:PORT (nor ipc://PATH)")
    return address


def _check_tcp(address: str) -> str:
    if not address.startswith("tcp://"):
        raise ValueError(f"{address!r} is not tcp://HOST:PORT")
    return address


Address = Annotated[str, AfterValidator(_check_address)]
TcpAddress = Annotated[Address, AfterValidator(_check_tcp)]


def _check_origin(origin: str) -> str:
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{origin!r} is not http[s]://HOST[:PORT] in lower case, without a path")
    return origin


Origin = Annotated[str, AfterValidator(_check_origin)]
TraceEndpoint = Annotated[str, AfterValidator(check_endpoint)]


def _empty_is_none(value: object) -> object:
    return None if value == "" else value


def _check_host(host: str) -> str:
    if not _HOST.fullmatch(host):
        raise ValueError(f"{host!r} is not a name or an address in lower case, without a port and brackets")
    return host


Host = Annotated[str, AfterValidator(_check_host)]


def _device_number(devices: object) -> object:
    """A single device, ``devices: 0``, is a number to YAML."""
    return str(devices) if type(devices) is int else devices


DeviceList = Annotated[str, BeforeValidator(_device_number)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Limits(_Section):
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
    deadline_s: Annotated[float, Field(gt=0)] = 600.0


class GatewayConfig(_Section):
    """The gateway's addresses and limits.

    Attributes:
        listen: Where clients connect, ``tcp://HOST:PORT``.
        events: Where the stages push what comes out.
        control: Where the stages connect for heartbeats and aborts.
        http: Where HTTP is served, written like the others; none switches it off.
        http_origins: Origins, besides the gateway's own, whose pages a browser may let use it.
        http_hosts: What HTTP requests may name as ``Host``, besides this machine and the hosts of
            ``http_origins``.  None stands for nothing else on the loopback, and for anything elsewhere.
        heartbeat_timeout_s: A stage that is silent for longer counts as gone.
        step_timeout_s: A stage whose loop has been in one step for longer counts as hung.
        limits: What is admitted.
    """

    listen: TcpAddress = "tcp://127.0.0.1:5555"
    events: Address = "tcp://127.0.0.1:5560"
    control: Address = "tcp://127.0.0.1:5561"
    http: TcpAddress | None = "tcp://127.0.0.1:8000"
    http_origins: list[Origin] = []
    http_hosts: list[Host] | None = None
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    step_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    limits: Limits = Limits()


class MediaConfig(_Section):
    """What sounds, pictures and videos a request may bring; checked before anything large is made of them.

    Attributes:
        max_item_bytes: Largest file.
        max_request_bytes: All files of a request together.
        max_audios: Most sounds of a request.
        max_images: Most pictures of a request.
        max_videos: Most videos of a request.
        max_audio_seconds: Longest sound; the checkpoint may allow less.
        min_image_side: A picture or video frame with a shorter side is refused; in pixels.
        max_image_pixels: Largest picture, and largest frame of a video.
        max_video_seconds: Longest video.
        max_video_frames: Most frames of a video after sampling, two a second.
        max_decoded_bytes: Most bytes of one item decoded; the frames of a video that would need more are
            scaled down while it is decoded.
        max_held_bytes: While the thinker holds more bytes of prepared items, further requests wait.
        decoders: Processes of the thinker that decode.
        decode_timeout_s: An item that takes longer to decode is refused.
        cache_bytes: Prepared items kept for the next request with the same file; 0 keeps none.
        url_hosts: Hosts from which the gateway may fetch media by https; none means by value only.
        url_timeout_s: Longest time for fetching one item.
    """

    max_item_bytes: Bytes = 64 * 2**20
    max_request_bytes: Bytes = 96 * 2**20
    max_audios: Annotated[int, Field(ge=0, le=MAX_MEDIA_ITEMS)] = 8
    max_images: Annotated[int, Field(ge=0, le=MAX_MEDIA_ITEMS)] = 16
    max_videos: Annotated[int, Field(ge=0, le=MAX_MEDIA_ITEMS)] = 4
    max_audio_seconds: Annotated[float, Field(gt=0)] = 300.0
    min_image_side: Annotated[int, Field(gt=0)] = 8
    max_image_pixels: Annotated[int, Field(gt=0)] = 50_000_000
    max_video_seconds: Annotated[float, Field(gt=0)] = 300.0
    max_video_frames: Annotated[int, Field(ge=2)] = 600
    max_decoded_bytes: Bytes = 384 * 2**20
    max_held_bytes: Bytes = 2**30
    decoders: Annotated[int, Field(gt=0)] = 2
    decode_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    url_hosts: list[str] = []
    url_timeout_s: Annotated[float, Field(gt=0)] = 10.0


class TracingConfig(_Section):
    """Whether and where traces of requests are told.

    Attributes:
        endpoint: A collector that speaks OTLP over HTTP, or the address below it that takes traces; none
            leaves it to OpenTelemetry's environment variables.
        sample_ratio: Share of the requests that are traced, unless the client decides.
    """

    endpoint: Annotated[TraceEndpoint | None, BeforeValidator(_empty_is_none)] = None
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0


class SynthesisEngineConfig(_Section):
    """The vLLM engine of token2wav, which has no KV cache and computes in float32.

    Field names here and in :class:`EngineConfig` follow vLLM's engine arguments.

    Attributes:
        max_num_seqs: Most requests in one batch.
        gpu_memory_utilization: Share of the device that vLLM may use when it measures.
    """

    max_num_seqs: Annotated[int, Field(gt=0)] = 16
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85


class EngineConfig(SynthesisEngineConfig):
    """The vLLM engine of a stage that generates tokens.

    Attributes:
        dtype: Of weights and activations; ``auto`` takes the checkpoint's.
        max_model_len: Most positions of one request; none takes the checkpoint's.
        max_num_batched_tokens: Most tokens computed in one step.
        kv_cache_memory_bytes: Size of the KV cache; none lets vLLM measure (right on a GPU).
        enforce_eager: No CUDA graphs, no compilation.
        tensor_parallel_size: GPUs of this stage.
        block_size: Positions per KV block; none takes the platform's.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Annotated[int, Field(gt=0)] | None = None
    max_num_batched_tokens: Annotated[int, Field(gt=0)] = 2048
    kv_cache_memory_bytes: Bytes | None = None
    enforce_eager: bool = False
    tensor_parallel_size: Annotated[int, Field(gt=0)] = 1
    block_size: Annotated[int, Field(gt=0)] | None = None


class ThinkerEngineConfig(EngineConfig):
    """The vLLM engine of the thinker.

    Attributes:
        enable_prefix_caching: Reuse the blocks of equal prompt beginnings.
    """

    enable_prefix_caching: bool = True


class StageConfig(_Section):
    """One stage process.

    Attributes:
        inbox: Where the stage listens for its input.
        threads: CPU threads of the model; none takes OMP_NUM_THREADS, or else a third of the cores.
        devices: ``CUDA_VISIBLE_DEVICES`` of the process; none leaves the environment as it is.
        max_payload_bytes: Largest tensor it takes from a socket.
        max_backlog_bytes: Most bytes that may wait for the next stage.
        heartbeat_s: Time between two heartbeats.
        http: Where ``/metrics``, ``/livez`` and ``/readyz`` are served; none serves none.
    """

    inbox: Address
    http: TcpAddress | None
    threads: Annotated[int, Field(gt=0)] | None = None
    devices: DeviceList | None = None
    max_payload_bytes: Bytes = DEFAULT_MAX_PAYLOAD_BYTES
    max_backlog_bytes: Bytes = 256 * 2**20
    heartbeat_s: Annotated[float, Field(gt=0)] = 0.5


class SynthesisConfig(_Section):
    """How token2wav cuts a stream into chunks, and how it solves the ODE.

    A block is 24 mel frames (12 codec tokens, 0.24 s) in the released checkpoints.

    Attributes:
        first_chunk_blocks: Length of a stream's first chunk: small, so that audio starts early.
        chunk_growth: Each next chunk is at most this many times longer.
        max_chunk_blocks: Longest chunk.
        look_ahead_blocks: Blocks after a chunk that must be known before it is computed.
        time_points: Points of the ODE's time axis; one less is the number of solver steps.
        guidance_scale: Classifier-free guidance.
        sway_coefficient: Sway sampling of the time axis (F5-TTS, arXiv 2410.06885).
        max_batch_frames: Most mel frames in one batch; a chunk that does not fit waits.
    """

    first_chunk_blocks: Annotated[int, Field(gt=0)] = 1
    chunk_growth: Annotated[int, Field(gt=0)] = 2
    max_chunk_blocks: Annotated[int, Field(gt=0)] = 8
    look_ahead_blocks: Annotated[int, Field(ge=0)] = 1
    time_points: Annotated[int, Field(ge=2, le=257)] = 10
    guidance_scale: Annotated[float, Field(ge=0)] = 0.5
    sway_coefficient: float | None = -1.0
    max_batch_frames: Annotated[int, Field(gt=0)] = 32_768


class ThinkerConfig(StageConfig):
    """The thinker stage.

    Attributes:
        engine: Its vLLM engine.
    """

    inbox: Address = "tcp://127.0.0.1:5562"
    http: TcpAddress | None = "tcp://127.0.0.1:5572"
    engine: ThinkerEngineConfig = ThinkerEngineConfig()


class TalkerConfig(StageConfig):
    """The talker stage.

    Attributes:
        engine: Its vLLM engine.
        playback_margin_s: While a reply is less than that ahead of its listener, those further ahead wait; 0
            lets none wait.
        max_held_bytes: Most bytes of conditioning rows that it holds; a request more is refused.
        prompt_mode: What the talker's prompt looks like to the model.  transformers 5.19 has two answers:
            ``unpadded``, for a prompt without padding: no codec embedding at the two start positions
            (its ``generate`` drops an all-ones attention mask, and the talker with it the embeddings);
            ``padded``, for one with padding: pad and start embeddings are added, as transformers 4 did
            always.  The default equals the reference run as most people run it; see
            docs/adr/0005.
    """

    inbox: Address = "tcp://127.0.0.1:5563"
    http: TcpAddress | None = "tcp://127.0.0.1:5573"
    engine: EngineConfig = EngineConfig()
    playback_margin_s: Annotated[float, Field(ge=0)] = 4.0
    max_held_bytes: Bytes = 4 * 2**30
    prompt_mode: Literal["unpadded", "padded"] = "unpadded"


class Token2WavConfig(StageConfig):
    """The token2wav stage.

    Attributes:
        engine: Its vLLM engine.
        playback_margin_s: While a chunk is wanted within that time, those wanted later wait; 0 lets none
            wait.
        synthesis: Chunking and solver.
    """

    inbox: Address = "tcp://127.0.0.1:5564"
    http: TcpAddress | None = "tcp://127.0.0.1:5574"
    engine: SynthesisEngineConfig = SynthesisEngineConfig()
    playback_margin_s: Annotated[float, Field(ge=0)] = 1.0
    synthesis: SynthesisConfig = SynthesisConfig()


class StagesConfig(_Section):
    """The three stages."""

    thinker: ThinkerConfig = ThinkerConfig()
    talker: TalkerConfig = TalkerConfig()
    token2wav: Token2WavConfig = Token2WavConfig()


class Config(_Section):
    """The whole stack.

    Attributes:
        model: Directory of the checkpoint, or its id on the Hugging Face hub; none is the small random
            checkpoint in :data:`DEFAULT_CHECKPOINT`.
        log_level: Of OmniRelay's own log lines.
        gateway: The gateway.
        media: Sounds, pictures and videos of requests.
        stages: The stages.
        tracing: Traces of requests.
    """

    model: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    gateway: GatewayConfig = GatewayConfig()
    media: MediaConfig = MediaConfig()
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
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
        )
        raise ConfigError(f"{source} (with environment overrides): {problems}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except _NOT_YAML as error:
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
        if not name.startswith(ENV_PREFIX):
            continue
        *sections, key = name.removeprefix(ENV_PREFIX).lower().split("__")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{name}: {part} is a value, not a section")
        try:
            section[key] = yaml.safe_load(text)
        except _NOT_YAML as error:
            raise ConfigError(f"{name}={text!r} is not a YAML value: {_in_one_line(error)}") from error
