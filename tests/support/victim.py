"""``python -m tests.support.victim STAGE --config FILE``: a stage that fails in its next step when told to.

The order is a file of its own for each process; SIGUSR1 says that it is there.  Without an order it fails in
each step that computes a request whose seed is one of :data:`POISON`.
"""

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final, Literal

from omnirelay.errors import OmniRelayError
from shared.config import Config
from shared.messages import STAGES, StageName, TalkerInput, ThinkerInput, Token2WavInput
from shared.stage.gateways import GatewayQueues
from shared.stage.process import Build, Context, run_stage
from shared.stage.service import StageService
from shared.transport.routing import PeerQueues

ORDER_VARIABLE: Final = "CHAOS_ORDER"
EXIT_STATUS: Final = 70
"""Of a stage that was told to exit."""

Moment = Literal["before", "after"]
"""Of the step: nothing of it was done, or all of it, and what came out is on its way."""

Poison = Literal["poison", "segfault"]
POISONS: Final[tuple[Poison, ...]] = ("poison", "segfault")
"""What a request does to the step of a stage that works on it: it raises, or ends the process."""
POISON: Final[dict[tuple[StageName, Poison], int]] = {
    (stage, poison): 9000 + 10 * index + kind
    for index, stage in enumerate(STAGES)
    for kind, poison in enumerate(POISONS)
}
"""The seeds of such requests."""

INPUTS: Final[dict[StageName, Any]] = {
    "thinker": ThinkerInput,
    "talker": TalkerInput,
    "token2wav": Token2WavInput,
}


class Doom:
    """Waits for the order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ordered: tuple[str, str] | None = None

    def hear(self, *_: object) -> None:
        """Read the order; the handler of the signal."""
        moment, failure = self._path.read_text(encoding="ascii").split(" ", 1)
        self._ordered = moment, failure

    def strike(self, service: StageService[Any]) -> None:
        """Let a service fail in the step that follows the order."""
        step = service.step

        def doomed() -> dict[str, OmniRelayError]:
            if self._ordered is None:
                return step()
            moment, failure = self._ordered
            if moment == "after":
                step()
            return _fail(failure)

        setattr(service, "step", doomed)  # noqa: B010 - a method may not be assigned to


def poison(service: StageService[Any]) -> None:
    """Let a service fail in each step that computes a request that does this to it."""
    accept = service.accept
    scheduler: Any = getattr(service, "_scheduler", None) or service._engine.scheduler  # type: ignore[attr-defined]
    schedule = scheduler.schedule
    kinds = {seed: kind for (stage, kind), seed in POISON.items() if stage == service.name}
    there: dict[str, Poison] = {}

    def taking(message: Any) -> None:
        accept(message)
        seed = getattr(message, "seed", None) or getattr(getattr(message, "speech", None), "seed", None)
        if seed in kinds:
            there[message.request_id] = kinds[seed]

    def poisoned(*arguments: Any) -> Any:
        output = schedule(*arguments)
        for engine_id in output.num_scheduled_tokens:
            for request_id, kind in there.items():
                if engine_id.startswith(request_id) and kind == "segfault":
                    os.kill(os.getpid(), signal.SIGSEGV)
                if engine_id.startswith(request_id):
                    raise RuntimeError(f"request {request_id} is poison")
        return output

    setattr(service, "accept", taking)  # noqa: B010 - a method may not be assigned to
    scheduler.schedule = poisoned


def _fail(failure: str) -> dict[str, OmniRelayError]:
    if failure == "hang":
        while True:
            time.sleep(3600)
    if failure == "exit":
        os._exit(EXIT_STATUS)
    if failure == "device memory":
        import torch  # noqa: PLC0415 - after the environment is prepared

        raise torch.OutOfMemoryError("told to be out of memory")
    raise MemoryError("told to be out of memory")


def _run(name: StageName) -> None:
    doom = Doom(Path(os.environ[ORDER_VARIABLE]))
    signal.signal(signal.SIGUSR1, doom.hear)
    build: Build = importlib.import_module(f"services.{name}.__main__").build

    def build_doomed(
        config: Config, model: Path, context: Context, gateway: GatewayQueues
    ) -> tuple[StageService[Any], PeerQueues[Any] | None]:
        service, peers = build(config, model, context, gateway)
        poison(service)
        doom.strike(service)
        return service, peers

    run_stage(name, INPUTS[name], build_doomed)


if __name__ == "__main__":
    stage = sys.argv.pop(1)
    _run(next(name for name in INPUTS if name == stage))
