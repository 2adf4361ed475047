"""``python -m tests.support.stopping WHAT SIGNAL EVERY``: a process, stopped at many moments of its start.

Each moment is a process of its own, forked from this one, which has loaded what takes long.  A line for each
says where the signal came, the exit status, and the seconds between; the last process was serving.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

START_S: Final = 60.0
DEADLINE_S: Final = 20.0
ROOT: Final = Path(__file__).parents[2]
OURS: Final = tuple(str(ROOT / package) for package in ("shared", "gateway"))
SERVING: Final = "serving"


@dataclass(frozen=True)
class Kind:
    """What is started.

    Attributes:
        begin: Runs it, and ends the process.
        handled: From the end of this function on its signals have handlers.
        serving: It serves when this function is called.
    """

    begin: Callable[[], object]
    handled: CodeType
    serving: CodeType


def stage() -> Kind:
    """A stage with an imitated engine."""
    from shared.config import Config, Token2WavConfig  # noqa: PLC0415 - one kind does not load the other's
    from shared.ending import Start  # noqa: PLC0415
    from shared.messages import Token2WavInput  # noqa: PLC0415
    from shared.stage.gateways import GatewayQueues  # noqa: PLC0415
    from shared.stage.loop import StageLoop  # noqa: PLC0415
    from shared.stage.process import Context, run_stage  # noqa: PLC0415
    from shared.vllm.environment import prepare_environment  # noqa: PLC0415
    from tests.shared.stages import EchoService  # noqa: PLC0415

    def build(_: Config, __: Path, ___: Context, gateway: GatewayQueues) -> tuple[Any, None]:
        service = EchoService()
        service.gateway = gateway
        return service, None

    prepare_environment(Token2WavConfig())
    return Kind(
        lambda: run_stage("token2wav", Token2WavInput, build), Start.__init__.__code__, StageLoop.run.__code__
    )


def gateway() -> Kind:
    """The gateway."""
    from gateway.__main__ import main  # noqa: PLC0415 - one kind does not load the other's
    from gateway.access.access import Access  # noqa: PLC0415
    from gateway.http.server import HttpServer  # noqa: F401, PLC0415 - takes long
    from shared.ending import leave_on_signals, run_to_end  # noqa: PLC0415

    return Kind(lambda: run_to_end(main), leave_on_signals.__code__, Access.warn.__code__)


class Moment:
    """Sends this process a signal at a call or return of our own code, or when it serves.

    Args:
        kind: What this process becomes.
        number: The signal.
        after: Calls and returns to let pass; those after the last are the moment when it serves.
        told: Where the place is written to.
    """

    def __init__(self, kind: Kind, number: signal.Signals, after: int, told: int) -> None:
        self._kind = kind
        self._number = number
        self._left = after
        self._told = told
        self._handled = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        self._handled = self._handled or (event == "return" and code is self._kind.handled)
        if not self._handled or not code.co_filename.startswith(OURS):
            return
        self._left -= 1
        serving = code is self._kind.serving
        if serving or self._left < 0:
            sys.setprofile(None)
            place = f"{Path(code.co_filename).relative_to(ROOT)}:{frame.f_lineno}"
            os.write(self._told, (SERVING if serving else place).encode())
            os.kill(os.getpid(), self._number)


def stop(kind: Kind, number: signal.Signals, after: int) -> str:
    """Fork a process that is stopped; gives the place, and prints it with how the process ended."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        sys.argv = ["stopped"]
        sys.setprofile(Moment(kind, number, after, theirs))
        kind.begin()
    os.close(theirs)
    descriptor = os.pidfd_open(pid)
    place = os.read(ours, 1000).decode() if select.select([ours], [], [], START_S)[0] else "no start"
    if not place:
        raise SystemExit("the process ended by itself, before it served")
    told = time.monotonic()
    if not select.select([descriptor], [], [], DEADLINE_S)[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(ours)
    os.close(descriptor)
    print(place, status, f"{time.monotonic() - told:.1f}", flush=True)
    return place


def main() -> None:
    what, number, every = sys.argv[1:]
    kind = {"stage": stage, "gateway": gateway}[what]()
    after = 0
    while stop(kind, signal.Signals[number], after) != SERVING:
        after += int(every)


if __name__ == "__main__":
    main()
