"""The processes that compute a model where ``tensor_parallel_size`` is above 1; otherwise there are none."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omnirelay.errors import WorkerLostError
from shared.ending import STOP_SIGNALS
from shared.log import configure_logging, logging_configuration
from shared.log.form import LogFormat
from shared.vllm.torchvision_compat import declare_missing_operators

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - POSIX's shared memory, not a temporary folder


@contextmanager
def prepared_workers() -> Iterator[None]:
    """Let the worker processes that vLLM starts in this context prepare themselves before they load it.

    vLLM has no place for that: a general plugin is called when its modules are loaded already.
    """
    from vllm.v1.executor.multiproc_executor import WorkerProc  # noqa: PLC0415 - a stage of one process needs none

    main = WorkerProc.worker_main
    WorkerProc.worker_main = _WorkerMain()
    try:
        yield
    finally:
        WorkerProc.worker_main = main


class _WorkerMain:
    """vLLM's main function of a worker process; to unpickle it there prepares the process."""

    def __reduce__(self) -> Any:
        return _prepare_worker, (logging_configuration(),)


def _prepare_worker(logs: tuple[str, str, LogFormat] | None) -> Callable[..., None]:
    """Prepare this process; its arguments, which load vLLM, are unpickled behind this.

    Args:
        logs: How the stage's own process logs.

    Returns:
        vLLM's main function.
    """
    if logs is not None:
        configure_logging(*logs)
    declare_missing_operators()
    from vllm.v1.executor.multiproc_executor import WorkerProc  # noqa: PLC0415 - loads torchvision

    main: Callable[..., None] = WorkerProc.worker_main
    return main


class Workers:
    """The worker processes of an engine."""

    def __init__(self, engine: "LLMEngine") -> None:
        self._executor: Any = engine.model_executor

    @property
    def lost(self) -> bool:
        """Whether one ended by itself; a thread of vLLM's watches them, and ends the others then."""
        return bool(getattr(self._executor, "is_failed", False))

    def check(self) -> None:
        """Raise :class:`WorkerLostError` if one is lost."""
        if self.lost:
            raise WorkerLostError("a worker process of the engine has ended")

    def close(self) -> None:
        """Let them end; those that do not are killed."""
        if getattr(self._executor, "workers", None):
            self._executor.shutdown()


def in_worker() -> bool:
    """Whether this is a worker process."""
    return multiprocessing.parent_process() is not None


def leave_ending_to_the_stage() -> None:
    """Ignore stop signals in a worker process.

    Ctrl-C and service managers signal all processes of a stage at once, and the stage needs its workers for
    the requests that it finishes.  They end with it: when it closes them, or its end of a pipe is gone.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def unlink_shared_memory() -> None:
    """Take the names off the memory that the workers of an engine on a CPU exchange tensors through.

    All of them have it by now.  It goes with the last one, however that ends.
    """
    name = os.environ.get("VLLM_DIST_IDENT")
    for path in _SHARED_MEMORY.glob(f"{name}-*") if name else ():
        # The other workers do the same.
        path.unlink(missing_ok=True)
