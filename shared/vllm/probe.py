"""``python -m shared.vllm.probe``: can the stages' libraries be loaded here, and which devices do they see?

Prints one JSON object on its last line; see :class:`shared.devices.EngineReport`.  A process of its own,
because whoever asks must not load these libraries, and because loading them may end a process.
"""

import logging
import os
import sys

import msgspec

from shared.config import ThinkerConfig
from shared.devices import EngineReport, Gpu
from shared.vllm.environment import prepare_environment


def probe() -> EngineReport:
    """Load PyTorch and vLLM, and look at the devices; raises whatever loading them does."""
    # All devices of the machine: a stage chooses among them with ``devices``.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    prepare_environment(ThinkerConfig(threads=1))
    import torch  # noqa: PLC0415 - after the environment
    import vllm  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return EngineReport(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        vllm=vllm.__version__,
        platform=current_platform.device_type,
        gpus=[Gpu(name=each.name, total_bytes=each.total_memory) for each in found],
        driver=_driver(),
    )


def _driver() -> str | None:
    """The newest CUDA version of the driver, by NVML: PyTorch says nothing of one that is too old for it."""
    from vllm.third_party import pynvml  # noqa: PLC0415 - as above

    try:
        pynvml.nvmlInit()
        version: int = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except pynvml.NVMLError:
        # No driver, or one of another maker.
        return None
    return f"{version // 1000}.{version % 1000 // 10}"


def main() -> int:
    """Print the report; the last line of standard error says why there is none."""
    logging.disable(logging.WARNING)
    try:
        report = probe()
    except Exception as error:  # noqa: BLE001  Anything may go wrong in there; that is what is asked for.
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
