"""The stages' sections of the configuration, with those of their engines."""

from typing import Annotated, Literal

from pydantic import Field

from shared.config.values import Bytes, DeviceList, InboxAddress, ReachableAddress, Section, TcpAddress
from shared.messages import MAX_REPLICAS
from shared.messages.bounds import DEFAULT_MAX_PAYLOAD_BYTES


class SynthesisEngineConfig(Section):
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


class StageConfig(Section):
    """One stage: its process, or each of them where there are several.

    Attributes:
        inbox: Where the stage listens for its input; with the port ``*``, on one that is free.
        advertise: The address by which others reach the inbox; none takes that of the inbox, or where it is
            all of the machine's, the one from which the gateway hears the stage.
        replicas: Processes that ``omnirelay up`` starts.  Each but the first listens on ports of its own.
        drain_s: How long the process goes on with its requests once it is told to stop.
        threads: CPU threads of the model; none takes OMP_NUM_THREADS, or else a third of the cores.
        devices: ``CUDA_VISIBLE_DEVICES`` of the process; none leaves the environment as it is.
        max_payload_bytes: Largest tensor it takes from a socket.
        max_backlog_bytes: Most bytes that may wait for one receiver, behind ``window_bytes``.
        heartbeat_s: Time between two heartbeats.
        niceness: Added to that of the threads that compute, so that those that send and receive, the gateway
            and clients get a core when they need one.
        http: Where ``/metrics``, ``/livez`` and ``/readyz`` are served; none serves none.
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


class SynthesisConfig(Section):
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
        max_batch_frames: Most mel frames that the solver advances in a step; what does not fit takes turns.
        max_vocoder_frames: Most mel frames that become audio in a step; a chunk with more does so in pieces.
    """

    first_chunk_blocks: Annotated[int, Field(gt=0)] = 1
    chunk_growth: Annotated[int, Field(gt=0)] = 2
    max_chunk_blocks: Annotated[int, Field(gt=0)] = 8
    look_ahead_blocks: Annotated[int, Field(ge=0)] = 1
    time_points: Annotated[int, Field(ge=2, le=257)] = 10
    guidance_scale: Annotated[float, Field(ge=0)] = 0.5
    sway_coefficient: float | None = -1.0
    max_batch_frames: Annotated[int, Field(gt=0)] = 4096
    max_vocoder_frames: Annotated[int, Field(gt=0)] = 512


class ThinkerConfig(StageConfig):
    """The thinker stage.

    Attributes:
        engine: Its vLLM engine.
    """

    inbox: InboxAddress = "tcp://127.0.0.1:5562"
    http: TcpAddress | None = "tcp://127.0.0.1:5572"
    engine: ThinkerEngineConfig = ThinkerEngineConfig()


class TalkerConfig(StageConfig):
    """The talker stage.

    Attributes:
        engine: Its vLLM engine.
        playback_margin_s: While a reply is less than that ahead of its listener, those further ahead wait; 0
            lets none wait.
        max_held_bytes: Most bytes of conditioning rows that it holds; a request more is refused.
    """

    inbox: InboxAddress = "tcp://127.0.0.1:5563"
    http: TcpAddress | None = "tcp://127.0.0.1:5573"
    engine: EngineConfig = EngineConfig()
    playback_margin_s: Annotated[float, Field(ge=0)] = 4.0
    max_held_bytes: Bytes = 4 * 2**30


class Token2WavConfig(StageConfig):
    """The token2wav stage.

    Attributes:
        engine: Its vLLM engine.
        playback_margin_s: While a chunk is wanted within that time, those wanted later wait; 0 lets none
            wait.
        synthesis: Chunking and solver.
    """

    inbox: InboxAddress = "tcp://127.0.0.1:5564"
    http: TcpAddress | None = "tcp://127.0.0.1:5574"
    engine: SynthesisEngineConfig = SynthesisEngineConfig()
    playback_margin_s: Annotated[float, Field(ge=0)] = 1.0
    synthesis: SynthesisConfig = SynthesisConfig()


class StagesConfig(Section):
    """The three stages."""

    thinker: ThinkerConfig = ThinkerConfig()
    talker: TalkerConfig = TalkerConfig()
    token2wav: Token2WavConfig = Token2WavConfig()
