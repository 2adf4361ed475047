"""The worker processes of engines whose model is computed by several."""

from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from vllm.envs import disable_envs_cache

from omnirelay.errors import WorkerLostError
from shared.config import ThinkerConfig, ThinkerEngineConfig
from shared.vllm.environment import prepare_environment
from tests.support.processes import wait_until

TWO: Final[dict[str, Any]] = {"tensor_parallel_size": 2}
ENDS_S: Final = 30.0
_SPAWNED: Final = "multiprocessing.spawn"
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - POSIX's shared memory


def prepare_two() -> None:
    """Set the environment for engines of two workers in this process."""
    # An engine of earlier tests has let vLLM keep what it read.
    disable_envs_cache()
    prepare_environment(ThinkerConfig(threads=2, engine=ThinkerEngineConfig(**TWO)))


def workers_of(pid: int) -> list[psutil.Process]:
    """The worker processes below a process."""
    below = psutil.Process(pid).children(recursive=True)
    return [each for each in below if "VLLM::Worker" in each.name() or _SPAWNED in " ".join(each.cmdline())]


def check_gone(processes: list[psutil.Process]) -> None:
    """Wait until processes have ended; whose children they are learns of it too."""
    wait_until(lambda: not any(map(_runs, processes)), "the end of worker processes", ENDS_S)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_names() -> set[str]:
    """The names of the memory that workers share."""
    return {path.name for path in _SHARED_MEMORY.glob("vllm_dist_*")}


def check_loss(rig: Any) -> None:
    """Kill one worker of an idle engine: its service finds it, and the other one ends too."""
    first, *others = workers_of_engine(rig.engine)
    assert len(others) == 1
    while rig.service.ready:
        rig.step()
    first.kill()
    check_gone([first, *others])
    assert rig.service.ready
    with pytest.raises(WorkerLostError, match="worker process"):
        rig.service.step()


def workers_of_engine(engine: Any) -> list[psutil.Process]:
    """The workers of an engine in this process."""
    return [psutil.Process(worker.proc.pid) for worker in engine.model_executor.workers]
