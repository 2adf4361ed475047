"""The matrix: what happens to which process while one chosen request is in which state."""

import http.client
import json
import random
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from omnirelay import Client
from omnirelay.errors import (
    BusyError,
    GatewayUnreachableError,
    OmniRelayError,
    PoisonRequestError,
    StageUnavailableError,
)
from shared.messages import STAGES
from tests.chaos.faults import FAULTS, GATEWAY_FAULTS, Fault, Strike, Target, strike
from tests.chaos.leaks import Footprint, footprints, leaks
from tests.chaos.streams import Heard, Stream, poison_for, request_for
from tests.support.processes import wait_until
from tests.support.proxy import Relay
from tests.support.restarting import STREAMS, RestartingStack, settled
from tests.support.victim import POISON, POISONS

State = Literal["queued", "thinking", "talking", "synthesizing"]
STATES: Final[tuple[State, ...]] = ("queued", "thinking", "talking", "synthesizing")
ORDER: Final = ("received", *STATES, "completed")
FILLER, QUEUED, NEWCOMER = STREAMS, STREAMS + 1, STREAMS + 2
"""Requests beside the eight: one takes the last place, one waits, one comes when it has happened."""
TRIES: Final = 5
CELL_S: Final = 240.0
"""Most that anything of a cell may take, the start of a stage on a slow machine included."""
TTFA_S: Final = 120.0
"""Most time to first audio of a request that comes when a stage has just died."""


class Cell(NamedTuple):
    """What is done, and when."""

    target: Target
    fault: Fault
    state: State

    def __str__(self) -> str:
        return f"{self.target}, {self.fault}, {self.state}"


MATRIX: Final = [
    *(Cell(stage, fault, state) for stage in STAGES for fault in FAULTS for state in STATES),
    *(Cell("gateway", fault, state) for fault in GATEWAY_FAULTS for state in STATES),
    *(Cell(stage, fault, state) for stage in STAGES for fault in POISONS for state in STATES[1:]),
]
ENGINES: Final[dict[Fault, int]] = {"poison": 2, "segfault": 3}
"""How many processes such a request ends before it is refused.  Of one that ends without a word nobody knows
why: a request is computed alone from the second time on."""


@dataclass
class Outcome:
    """What came of a cell.

    Attributes:
        cell: Which one.
        tries: How often it was tried until the chosen request was in the state when it happened.
        hit: It was.
        resumed: Requests that were begun anew, counting each time.
        recovery_s: From then until the last of the requests that were begun anew streamed again; of a gateway
            that ended or was cut off, until all streams went on.
        ttfa_s: Time to first audio of a request that came just then, asked again while it was turned away.
        seconds: How long it took, until nothing was left of it.
        faults: What is not as it should be.
    """

    cell: Cell
    tries: int = 0
    hit: bool = False
    resumed: int = 0
    recovery_s: float | None = None
    ttfa_s: float | None = None
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


class Watcher:
    """Asks the gateway how requests are, over one connection."""

    def __init__(self, stack: RestartingStack) -> None:
        address = stack.config["gateway"]["http"].removeprefix("tcp://")
        self._connection = http.client.HTTPConnection(address, timeout=20)

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def report(self, request_id: str) -> dict[str, Any]:
        """What the gateway knows of a request."""
        try:
            return self._ask(request_id)
        except ConnectionError:
            # It was idle for too long, and is made anew.
            self._connection.close()
            return self._ask(request_id)

    def _ask(self, request_id: str) -> dict[str, Any]:
        self._connection.request("GET", f"/v1/requests/{request_id}")
        report: dict[str, Any] = json.loads(self._connection.getresponse().read())
        return report

    def state(self, stream: Stream) -> str:
        """Where a request is."""
        name = stream.request_id
        return "received" if name is None else self.report(name)["state"]

    def await_state(self, stream: Stream, state: State) -> bool:
        """Wait until a request is in a state; False if that has passed."""
        until = time.monotonic() + CELL_S
        while (now := self.state(stream)) != state:
            if now not in ORDER or ORDER.index(now) > ORDER.index(state):
                return False
            if time.monotonic() > until:
                raise TimeoutError(f"request {stream.number} is still {now}")
            time.sleep(0.002)
        return True


class Newcomer(threading.Thread):
    """A client that comes when it has happened, and comes again while it is turned away."""

    def __init__(self, stack: RestartingStack) -> None:
        super().__init__(name="newcomer", daemon=True)
        self._address = stack.address
        self._until = time.monotonic() + CELL_S
        self.heard = Heard()
        self.began: Final = time.monotonic()
        self.start()

    @property
    def ttfa_s(self) -> float | None:
        """Time to first audio."""
        return None if self.heard.first_audio is None else self.heard.first_audio - self.began

    def run(self) -> None:
        while not self._ask() and time.monotonic() < self._until:
            time.sleep(0.1)

    def _ask(self) -> bool:
        """Ask once; False if it was turned away."""
        self.heard = Heard()
        try:
            with Client(self._address) as client:
                for event in client.chat(request_for(NEWCOMER)):
                    self.heard.take(event)
        except (StageUnavailableError, BusyError, GatewayUnreachableError) as error:
            self.heard.error = error
            return False
        except OmniRelayError as error:
            self.heard.error = error
        return True


class Campaign:
    """Runs cells, one after the other, on one stack.

    Args:
        stack: It runs.
        chance: What is drawn.
    """

    def __init__(self, stack: RestartingStack, chance: random.Random) -> None:
        self._stack = stack
        self._chance = chance
        self._undisturbed = self._listen()
        # Once more: what is made at the first request, as threads and caches are, is there then.
        self._listen()
        wait_until(lambda: not settled(stack), "the stack is at rest", CELL_S)
        self._before: dict[str, Footprint] = footprints(stack)

    def run(self, cell: Cell) -> Outcome:
        """Run a cell, again if the chosen request was too quick."""
        outcome, began = Outcome(cell), time.monotonic()
        try:
            while not outcome.hit and outcome.tries < TRIES and not outcome.faults:
                outcome.tries += 1
                self._try(outcome)
        except (TimeoutError, AssertionError, OmniRelayError, OSError) as error:
            outcome.faults.append(f"{type(error).__name__}: {error}")
        if not outcome.hit and not outcome.faults:
            outcome.faults.append(f"the request was never {cell.state} when it happened")
        outcome.seconds = time.monotonic() - began
        return outcome

    def _listen(self) -> list[Heard]:
        until = time.monotonic() + CELL_S
        with Client(self._stack.address) as client:
            streams = [Stream(client, number) for number in range(NEWCOMER + 1)]
            heard = [stream.result(until) for stream in streams]
        for each in heard:
            if each.error is not None:
                raise each.error
        return heard

    def _try(self, outcome: Outcome) -> None:
        cell, stack = outcome.cell, self._stack
        deaths = len(stack.deaths)
        until = time.monotonic() + CELL_S
        further = [stack.addresses(gateway)["listen"] for gateway in stack.gateways[1:]]
        with ExitStack() as closing:
            line = closing.enter_context(Relay(stack.address))
            # Those of the first gateway go on at the next; those of the others stay where they are.
            connect = [[line.address, *further], *([address] for address in further)]
            clients = [closing.enter_context(Client(each, reconnect_s=CELL_S)) for each in connect]
            client = clients[0]
            with Watcher(stack) as watcher:
                # A request that ends a stage's process is the eighth.
                among = STREAMS - (cell.fault in POISONS)
                numbers = range(QUEUED + 1 if cell.state == "queued" else among)
                streams = [Stream(clients[number % len(clients)], number) for number in numbers]
                ours = streams[:: len(clients)]
                chosen = ours[-1] if cell.state == "queued" else self._chance.choice(ours)
                reached = watcher.await_state(chosen, cell.state)
                if reached and cell.target == "gateway" and cell.fault == "stop":
                    # What it has not taken yet would be turned away.
                    wait_until(lambda: all(each.request_id for each in streams), "all are taken", CELL_S)
                done, poison = self._strike(cell, client, line) if reached else (None, None)
                newcomer = Newcomer(stack) if done else None
                if done and cell.target != "gateway":
                    outcome.hit = watcher.state(chosen) == cell.state
                elif done:
                    outcome.hit = True
            for stream in [*streams, *([poison] if poison else [])]:
                stream.result(until)
        if done is None or newcomer is None:
            return
        newcomer.join(max(0.0, until - time.monotonic()))
        done.rest.result(CELL_S)
        if done.dies:
            ends = ENGINES.get(cell.fault, 1)
            wait_until(lambda: len(stack.deaths) >= deaths + ends, "the process ends", CELL_S)
        wait_until(stack.all_ready, "all replicas are ready again", CELL_S)
        self._judge(outcome, done, streams, newcomer)
        if poison is not None:
            outcome.faults += _judge_poison(cell, poison.heard, len(stack.deaths) - deaths)
        outcome.faults += leaks(stack, self._before)

    def _strike(self, cell: Cell, client: Client, line: Relay) -> tuple[Strike, Stream | None]:
        """Do it; gives the request that does it, if it is one."""
        if cell.target == "gateway" or cell.fault not in POISONS:
            return strike(self._stack, cell.target, cell.fault, self._chance, line), None
        rest: Future[None] = Future()
        rest.set_result(None)
        poison = Stream(client, STREAMS - 1, poison_for(POISON[cell.target, cell.fault]))
        return Strike(time.monotonic(), dies=True, rest=rest), poison

    def _judge(self, outcome: Outcome, done: Strike, streams: list[Stream], newcomer: Newcomer) -> None:
        """Compare all answers with those of the undisturbed run."""
        replaced = outcome.cell.target == "gateway" and done.dies
        for stream in streams:
            found = stream.heard.differences(self._undisturbed[stream.number])
            outcome.faults += [f"request {stream.number}: {what}" for what in found]
        found = newcomer.heard.differences(self._undisturbed[NEWCOMER])
        outcome.faults += [f"the newcomer: {what}" for what in found]
        outcome.ttfa_s = newcomer.ttfa_s
        if outcome.ttfa_s is not None and outcome.ttfa_s > TTFA_S:
            outcome.faults.append(f"the newcomer heard nothing for {outcome.ttfa_s:.1f} s")
        if replaced or outcome.cell.fault == "cut":
            # The gateway counts only what it resumes itself.
            struck = streams[:: len(self._stack.gateways)]
            streamed = [each for each in struck if request_for(each.number).streaming]
            outcome.recovery_s = max(each.heard.silence_after(done.at) for each in streamed)
            return
        with Watcher(self._stack) as watcher:
            resumes = [watcher.report(stream.request_id or "-").get("resumes", 0) for stream in streams]
        outcome.resumed = sum(resumes)
        # An answer in one piece is silent for most of its time.
        again = [
            stream.heard.silence_after(done.at)
            for stream, count in zip(streams, resumes, strict=True)
            if count and request_for(stream.number).streaming
        ]
        outcome.recovery_s = max(again, default=None)


def _judge_poison(cell: Cell, heard: Heard, ended: int) -> list[str]:
    """What is wrong with the end of a request that ends processes."""
    found = []
    if not isinstance(heard.error, PoisonRequestError) or cell.target not in str(heard.error):
        found.append(f"the request that ends processes was told {heard.error!r}")
    if ended != ENGINES[cell.fault]:
        found.append(f"it ended {ended} processes, not {ENGINES[cell.fault]}")
    return found
