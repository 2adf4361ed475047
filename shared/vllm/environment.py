"""Process-wide switches that must be set before torch or vLLM is imported."""

import ctypes
import logging
import os
from typing import Final

from shared.config import StageConfig, TalkerConfig, ThinkerConfig, Token2WavConfig
from shared.devices import cuda_compiler
from shared.engine_defaults import compute_threads
from shared.messages import STAGES

INHERITED_DEVICES: Final = os.environ.get("CUDA_VISIBLE_DEVICES")
"""As the process was started with, which stages without ``devices`` have."""
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
"""Of mallopt(3)."""
_COMPILED_WITH_NVCC: Final = (
    "VLLM_ALLREDUCE_USE_FLASHINFER",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM",
)
"""vLLM's switches, on by default, for kernels that nvcc compiles at the first use; it has others as well."""
log = logging.getLogger(__name__)


def prepare_environment(config: StageConfig, stages: int = len(STAGES)) -> None:
    """Set what torch and vLLM read from the environment at import.

    The engine core runs in the stage's own process: one process, one loop, no hop in between.

    Args:
        stages: How many stages share the machine, for all that is known.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Model runner V1 runs on CPUs and GPUs alike, and takes pooling tasks of our own; V2 does neither yet.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Requests have seeds of their own, which it does not draw by; vLLM's trial run alone would compile it.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if cuda_compiler() is None:
        for switch in _COMPILED_WITH_NVCC:
            os.environ.setdefault(switch, "0")
    # vLLM's lines are written as those of all libraries, see shared/log.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    if level := os.environ.get("VLLM_LOGGING_LEVEL"):
        logging.getLogger("vllm").setLevel(level.upper())
    # Their warnings are about our choices (a scheduler of our own, no compilation on CPUs), not the user's.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # oneDNN keeps compiled code for each shape of a product or convolution, up to 1,024: prompts of ever new
    # lengths would let a stage on a CPU grow for hours.  Too few, and a vocoder, some fifty convolutions for
    # each length of a chunk, compiles them all anew every time.
    shapes = 512 if isinstance(config, Token2WavConfig) else 64
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(shapes))
    workers = config.engine.tensor_parallel_size if isinstance(config, ThinkerConfig | TalkerConfig) else 1
    if config.threads is not None or workers > 1 or not os.environ.get("OMP_NUM_THREADS"):
        threads = compute_threads(config.threads, stages)
        os.environ["OMP_NUM_THREADS"] = str(max(1, threads // workers))
    if workers > 1:
        _prepare_workers()
    if config.devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.devices
    from shared.vllm.torchvision_compat import declare_missing_operators  # noqa: PLC0415 - imports torch

    declare_missing_operators()


def _prepare_workers() -> None:
    """Set what vLLM's worker processes of one engine read."""
    # A forked one would have ZeroMQ's sockets without their threads.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # On a CPU vLLM binds each to a NUMA node of its own, and refuses to start where there are fewer.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # They are all on this machine, and take what comes from each other without asking who it is.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # If one is lost, the others wait for it; no longer than this, in seconds.
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")


def give_back_large_blocks(threshold: int = 2**20) -> None:
    """Let this process return every freed block of at least ``threshold`` bytes to the system.

    Without it glibc raises its own threshold to the largest block that was ever freed, and a process that
    takes and frees blocks of all sizes, as decoded media are, keeps the holes between them.  Each such block
    costs page faults, so this is not for processes that do nothing else.  Nothing happens without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(_M_MMAP_THRESHOLD, threshold) and mallopt(_M_ARENA_MAX, 2)):
        log.info("the allocator cannot be told to give memory back")
