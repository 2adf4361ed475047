"""The stages' sections of the configuration.  docs/configuration.md describes every key."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from shared.config.values import Bytes, DeviceList, InboxAddress, ReachableAddress, Section, TcpAddress
from shared.messages import MAX_REPLICAS
from shared.messages.bounds import DEFAULT_MAX_PAYLOAD_BYTES

Precision: TypeAlias = Literal["exact", "fast", "bfloat16"]
"""Of float32 on a GPU: as written, as TF32, or with a solver's products in bfloat16."""


class SynthesisEngineConfig(Section):
    """The vLLM engine of token2wav, which has no KV cache and computes in float32.

    Field names here and in :class:`EngineConfig` are those of vLLM's engine arguments.
    """

    max_num_seqs: Annotated[int, Field(gt=0)] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    enforce_eager: bool = False


class EngineConfig(SynthesisEngineConfig):
    """The vLLM engine of a stage that generates tokens."""

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
    """The vLLM engine of the thinker."""

    enable_prefix_caching: bool = True


class StageConfig(Section):
    """One stage, with any number of replicas."""

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


class SynthesisConfig(Section):
    """How token2wav splits a stream into chunks and solves the ODE.

    A block is 24 mel frames (12 codec tokens, 0.24 s) in the released checkpoints.
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
    """The thinker stage."""

    inbox: InboxAddress = "tcp://127.0.0.1:5562"
    http: TcpAddress | None = "tcp://127.0.0.1:5572"
    engine: ThinkerEngineConfig = ThinkerEngineConfig()
    playback_margin_s: Annotated[float, Field(ge=0)] = 2.0


class TalkerConfig(StageConfig):
    """The talker stage."""

    inbox: InboxAddress = "tcp://127.0.0.1:5563"
    http: TcpAddress | None = "tcp://127.0.0.1:5573"
    engine: EngineConfig = EngineConfig()
    playback_margin_s: Annotated[float, Field(ge=0)] = 4.0
    max_held_bytes: Bytes = 4 * 2**30


class Token2WavConfig(StageConfig):
    """The token2wav stage."""

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
