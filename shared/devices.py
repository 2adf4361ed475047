"""What PyTorch and vLLM report of a machine, from a process that has loaded them."""

import msgspec


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU.

    Attributes:
        uuid: Names it on this machine; empty if it is not known.
    """

    name: str
    free_bytes: int
    total_bytes: int
    uuid: str = ""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Versions of the libraries, and the GPUs.

    Attributes:
        cuda: CUDA version that PyTorch was built for; None for a CPU build.
        platform: Where vLLM computes: ``cpu`` or ``cuda``.
    """

    torch: str
    cuda: str | None
    vllm: str
    platform: str
    gpus: list[Gpu] = []
