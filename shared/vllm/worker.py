"""The worker of the two stages that draw tokens: vLLM's of this platform, prepared for a stage."""

from typing import Any

import torch
from vllm.platforms import current_platform

from shared.ending import end_process
from shared.vllm.platform import worker_base
from shared.vllm.workers import in_worker, leave_ending_to_the_stage, unlink_shared_memory

_Worker: Any = worker_base()


class StageWorker(_Worker):
    """vLLM's worker, which as a process of its own ends with its stage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if in_worker():
            leave_ending_to_the_stage()

    def init_device(self) -> None:
        """Find the other workers."""
        super().init_device()
        if current_platform.is_cpu():
            # vLLM has small functions compiled at their first call (ranks of log probabilities): for seconds
            # nobody would be answered.
            torch.compiler.set_stance("force_eager")
        if in_worker():
            unlink_shared_memory()

    def shutdown(self) -> None:
        """End; a worker process does at once, for vLLM would collect its garbage first, for seconds."""
        if in_worker():
            end_process(0)
        super().shutdown()
