"""What the libraries of the stages see of a machine; told by a process that has them loaded."""

import msgspec


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU.

    Attributes:
        name: For people.
        free_bytes: Of its memory, when it was asked.
        total_bytes: Its memory.
    """

    name: str
    free_bytes: int
    total_bytes: int


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What could be loaded.

    Attributes:
        torch: Version of PyTorch.
        cuda: Version of CUDA that PyTorch was built for; none for a CPU build.
        vllm: Version of vLLM.
        platform: Where vLLM would compute: ``cpu`` or ``cuda``.
        gpus: All of the machine.
    """

    torch: str
    cuda: str | None
    vllm: str
    platform: str
    gpus: list[Gpu] = []
