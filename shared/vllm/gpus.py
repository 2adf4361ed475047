"""The GPUs of this process, and loading engines on them."""

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from vllm.platforms import current_platform
from vllm.third_party import pynvml

from shared.devices import Gpu
from shared.vllm.platform import require_platform

log = logging.getLogger(__name__)


def visible_gpus() -> list[Gpu]:
    """The devices that this process sees, in their order; none on a CPU.

    They are asked through vLLM's platform, which makes no context on them.

    Raises:
        StageStartError: The stages cannot compute on them.
    """
    require_platform()
    if current_platform.is_cpu():
        return []
    return [_read(index) for index in range(current_platform.device_count())]


def _read(index: int) -> Gpu:
    # NVML, which vLLM asks, knows of a slice only the size of the whole card.
    total = _slice_bytes(index) or current_platform.get_device_total_memory(index)
    name = current_platform.get_device_name(index)
    return Gpu(name=name, total_bytes=total, uuid=_uuid(index))


def _slice_bytes(index: int) -> int | None:
    """The memory of a MIG slice, by CUDA; None of a whole device, on which nothing is asked of CUDA."""
    try:
        pynvml.nvmlInit()
        physical = current_platform.device_id_to_physical_device_id(index)
        enabled, _ = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(physical))
    except pynvml.NVMLError:
        # Most cards cannot be sliced, and devices of other makers have no NVML.
        return None
    return torch.cuda.get_device_properties(index).total_memory if enabled else None


def _uuid(index: int) -> str:
    try:
        return str(current_platform.get_device_uuid(index))
    except NotImplementedError:
        # Not every platform names its devices; the index tells those of one machine apart.
        return f"{current_platform.device_type}-{current_platform.device_id_to_physical_device_id(index)}"


@contextmanager
def loading(gpus: Sequence[Gpu], measures: bool) -> Iterator[None]:
    """Load an engine; one that ``measures`` alone among the processes of this user on these GPUs.

    vLLM compares a GPU's free memory before and after, unless it is told how large a KV cache to make;
    another engine that loads meanwhile would change it.
    """
    kind = fcntl.LOCK_EX if measures else fcntl.LOCK_SH
    with ExitStack() as stack:
        for uuid in sorted({gpu.uuid for gpu in gpus}):
            path = lock_folder() / f"gpu-{hashlib.sha256(uuid.encode()).hexdigest()[:16]}.lock"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                log.warning(
                    "%s cannot be locked (%s): another engine may load on the GPU meanwhile", path, error
                )
                continue
            stack.callback(os.close, file)
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("waiting for another engine to load on the same GPU")
                fcntl.flock(file, kind)
        yield


def lock_folder() -> Path:
    """Where the locks are: stages that share a GPU share it, in containers by a volume."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omnirelay"
