"""The stages' sections of the configuration."""

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from shared.config.values import (
    Bytes,
    DeviceList,
    InboxAddress,
    ReachableAddress,
    Section,
    TcpAddress,
    further,
)
from shared.messages import MAX_REPLICAS
from shared.messages.payloads import DEFAULT_MAX_PAYLOAD_BYTES

Precision: TypeAlias = Literal["exact", "fast", "bfloat16"]
"""Of float32 on a GPU: as written, as TF32, or with a solver's products in bfloat16."""
HTTP_PORTS_APART: Final = 10
"""Distance of a replica's HTTP port from the one before."""


class SynthesisEngineConfig(Section):
    """The vLLM engine of token2wav, which has no KV cache and computes in float32.

    Field names here and in :class:`EngineConfig` are those of vLLM's engine arguments.

    Attributes:
        max_num_seqs: Most requests in one batch; in token2wav, most chunks. Default: 16 on a CPU, 64 on a
            GPU.
        gpu_memory_utilization: Share of the GPU that the stage may use. Default: 0.85 of its own GPU; its
            part of a shared one. See docs/models.md#one-gpu.
        enforce_eager: No CUDA graphs, no compilation. Always so on a CPU.
    """

    max_num_seqs: Annotated[int, Field(gt=0)] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    enforce_eager: bool = False


class EngineConfig(SynthesisEngineConfig):
    """The vLLM engine of a stage that generates tokens.

    Attributes:
        quantization: How the weights are quantised. Default: what ``config.json`` says. See
            docs/models.md#quantised-weights.
        kv_cache_dtype: ``auto``, ``fp8``, ``fp8_e4m3`` or ``fp8_e5m2``: a quantised KV cache. See
            docs/models.md#quantised-weights.
        load_format: How vLLM reads the weights: ``auto``, ``safetensors``, ``fastsafetensors``,
            ``runai_streamer``, …
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``.
        max_model_len: Most positions of one request. Default: the checkpoint's.
        max_num_batched_tokens: Most tokens computed in one step.
        kv_cache_memory_bytes: Size of the KV cache. Default: 256 MiB on a CPU; on a shared GPU its part; on
            another what vLLM measures. See docs/models.md#one-gpu.
        tensor_parallel_size: Devices that share the model. Thinker and talker only. See
            docs/models.md#a-model-on-several-devices.
        block_size: Positions per KV block. Default: 32 on a CPU, vLLM's choice on a GPU.
    """

    quantization: Annotated[str, Field(min_length=1)] | None = None
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    load_format: Annotated[str, Field(min_length=1)] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Annotated[int, Field(gt=0)] | None = None
    max_num_batched_tokens: Annotated[int, Field(gt=0)] = 2048
    kv_cache_memory_bytes: Bytes | None = None
    tensor_parallel_size: Annotated[int, Field(gt=0)] = 1
    block_size: Annotated[int, Field(gt=0)] | None = None


class ThinkerEngineConfig(EngineConfig):
    """The vLLM engine of the thinker.

    Attributes:
        enable_prefix_caching: Reuse the KV blocks of equal prompt beginnings. Thinker only.
    """

    enable_prefix_caching: bool = True


class StageConfig(Section):
    """One stage, with any number of replicas.

    Attributes:
        advertise: Address by which others reach the inbox. Default: ``inbox``; if that is all addresses, the
            one from which the gateway hears the stage.
        replicas: Processes of the stage that ``omnirelay up`` starts. See docs/replicas.md.
        drain_s: How long a stopped stage continues its requests. Not shorter than ``gateway.drain_s`` where
            all stop at once.
        threads: CPU threads of the model. Default: ``OMP_NUM_THREADS``, else a third of the cores.
        devices: ``CUDA_VISIBLE_DEVICES`` of the process, ``0`` or ``"0,1"``. Default: the environment's.
        max_payload_bytes: Largest tensor that the stage accepts.
        max_backlog_bytes: Most bytes that may wait in the stage for one receiver, beyond ``window_bytes``.
        heartbeat_s: Time between two heartbeats; more with many replicas. See docs/lifecycle.md#heartbeats.
        niceness: Added to the niceness of compute threads, so that I/O threads get a core.
    """

    inbox: InboxAddress
    http: TcpAddress | None
    advertise: ReachableAddress | None = None
    replicas: Annotated[int, Field(gt=0, le=MAX_REPLICAS)] = 1
    drain_s: Annotated[float, Field(ge=0)] = 10.0
    threads: Annotated[int, Field(gt=0)] | None = None
    devices: DeviceList | None = None
    max_payload_bytes: Bytes = DEFAULT_MAX_PAYLOAD_BYTES
    max_backlog_bytes: Bytes = 256 * 2**20
    heartbeat_s: Annotated[float, Field(gt=0)] = 0.5
    niceness: Annotated[int, Field(ge=0, le=19)] = 5

    def own_addresses(self, number: int) -> dict[str, str | None]:
        """Where the replica of a number, from 1, listens; a further one's inbox takes a free port."""
        inbox = self.inbox
        if number > 1:
            inbox = f"{inbox}.{number}" if inbox.startswith("ipc://") else f"{inbox.rpartition(':')[0]}:*"
        return {"inbox": inbox, "http": self.http and further(self.http, number, HTTP_PORTS_APART)}


class SynthesisConfig(Section):
    """How token2wav splits a stream into chunks of blocks (24 mel frames, 0.24 s) and solves the ODE.

    Attributes:
        first_chunk_blocks: Length of the first chunk.  Without streaming a reply is one chunk, of any length.
        max_chunk_blocks: Longest chunk, also of a request's ``chunk_frames``.
        look_ahead_blocks: Blocks after a chunk that must be known before it is computed.
        time_points: Points of the ODE's time axis, from 2 to 257; the solver takes one step fewer.
        guidance_scale: Classifier-free guidance. Below 1e-5 there is none, and half the work.
        sway_coefficient: Sway sampling of the time axis. ``null`` spaces the points evenly.
        max_batch_frames: Most mel frames solved in a step. A larger chunk runs alone.
        max_vocoder_frames: Most mel frames converted to audio in a step; longer chunks in pieces.
        precision: On a GPU: ``fast`` (TF32), ``exact`` (float32, for parity with transformers), or
            ``bfloat16`` (the DiT). A CPU is always exact. See docs/models.md#half-precision.
    """

    first_chunk_blocks: Annotated[int, Field(gt=0)] = 1
    max_chunk_blocks: Annotated[int, Field(gt=0)] = 8
    look_ahead_blocks: Annotated[int, Field(ge=0)] = 1
    time_points: Annotated[int, Field(ge=2, le=257)] = 10
    guidance_scale: Annotated[float, Field(ge=0)] = 0.5
    sway_coefficient: float | None = -1.0
    max_batch_frames: Annotated[int, Field(gt=0)] = 4096
    max_vocoder_frames: Annotated[int, Field(gt=0)] = 512
    precision: Precision = "fast"


class ThinkerConfig(StageConfig):
    """The thinker stage.

    Attributes:
        inbox: Where the thinker listens for the gateway. Port ``*`` takes a free one.
        http: Where the thinker serves metrics and health. ``null``: nowhere; vLLM then keeps no metrics. See
            docs/metrics.md.
        playback_margin_s: While a reply is less than this ahead of its listener, replies further ahead wait,
            and prompts are computed in pieces. 0: neither. See docs/stages.md#the-playback-clock.
    """

    inbox: InboxAddress = "tcp://127.0.0.1:5562"
    http: TcpAddress | None = "tcp://127.0.0.1:5572"
    engine: ThinkerEngineConfig = ThinkerEngineConfig()
    playback_margin_s: Annotated[float, Field(ge=0)] = 2.0


class TalkerConfig(StageConfig):
    """The talker stage.

    Attributes:
        inbox: Where the talker listens for the thinker.
        http: Where the talker serves metrics and health, as ``stages.thinker.http``.
        playback_margin_s: As ``stages.thinker.playback_margin_s``.
        max_held_bytes: Most bytes of conditioning rows in the talker. See
            docs/memory.md#rows-that-the-talker-holds.
    """

    inbox: InboxAddress = "tcp://127.0.0.1:5563"
    http: TcpAddress | None = "tcp://127.0.0.1:5573"
    engine: EngineConfig = EngineConfig()
    playback_margin_s: Annotated[float, Field(ge=0)] = 4.0
    max_held_bytes: Bytes = 4 * 2**30


class Token2WavConfig(StageConfig):
    """The token2wav stage.

    Attributes:
        inbox: Where token2wav listens for the talker.
        http: Where token2wav serves metrics and health, as ``stages.thinker.http``.
        playback_margin_s: A chunk is cut when its listener has this much left, beyond the time for synthesis.
            0: as soon as a block is there.
    """

    inbox: InboxAddress = "tcp://127.0.0.1:5564"
    http: TcpAddress | None = "tcp://127.0.0.1:5574"
    engine: SynthesisEngineConfig = SynthesisEngineConfig()
    playback_margin_s: Annotated[float, Field(ge=0)] = 0.5
    synthesis: SynthesisConfig = SynthesisConfig()


class StagesConfig(Section):
    """The three stages."""

    thinker: ThinkerConfig = ThinkerConfig()
    talker: TalkerConfig = TalkerConfig()
    token2wav: Token2WavConfig = Token2WavConfig()
