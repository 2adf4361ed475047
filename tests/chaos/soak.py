"""Minutes of mixed load, with a process killed, frozen, stopped or failing every now and then."""

import random
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.measure.results import Cell, Table
from omnirelay import Client, GenerateRequest
from omnirelay.errors import BusyError, GatewayUnreachableError, OmniRelayError, StageUnavailableError
from shared.messages import STAGES
from tests.chaos.cells import CELL_S, Watcher
from tests.chaos.faults import MEANING, Fault, Target, strike
from tests.chaos.leaks import MIB, footprints, leaks
from tests.chaos.memory import GROWTH, SPARE, MemoryWatch
from tests.chaos.mixture import Kind, catalogue, hear_a_part, leave, listen, read_slowly
from tests.chaos.report import FIGURES, figures
from tests.chaos.streams import Heard
from tests.support.processes import wait_until
from tests.support.restarting import RestartingStack
from tests.support.traffic import Clients

CLIENTS: Final = 6
CLEAN_S: Final = 2.0
"""A client that does not reconnect knows by then that its gateway was killed."""
STRIKES_S: Final = (15.0, 45.0)
"""Least and most time from when all is well again until something happens again."""
STAGE_STRIKES: Final[tuple[Fault, ...]] = ("kill", "freeze", "hang", "exit", "memory", "stop")
GATEWAY_STRIKES: Final[tuple[Fault, ...]] = ("kill", "stop")
TARGETS: Final[tuple[Target, ...]] = (*STAGES, *STAGES, "gateway")
"""The gateway half as often as a stage."""
MANNERS: Final = ("whole", "whole", "whole", "slowly", "cancelled", "left")
_HOW: Final = {
    "slowly": ", read slowly",
    "cancelled": ", cancelled on the way",
    "left": ", its client goes away",
}
_GIVEN_UP: Final = re.compile(r"request (\w+) (?:cancelled|expired) from (\w+): ")
_DROPPED: Final = re.compile(r"request (\w+)(?:\.\d+)? was dropped by all its stages after ([\d.]+) s")


@dataclass
class Tally:
    """What became of the requests of one kind.

    Attributes:
        asked: Those that the gateway took.
        answered: Those whose answer is the undisturbed one, as far as its client wanted it.
        resumed: Those that were begun anew.
        resumes: How often, together.
        turned_away: Times that a client was told to come again, or found no gateway.
        cut_off: Requests that ended with a killed gateway, whose clients were told so at once.
        lost: Why those that have no whole answer have none.
        wrong: How those differ that were answered otherwise.
    """

    asked: int = 0
    answered: int = 0
    resumed: int = 0
    resumes: int = 0
    turned_away: int = 0
    cut_off: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def figures(self) -> tuple[int, ...]:
        """A row of the table."""
        lost, wrong = len(self.lost), len(self.wrong)
        told = self.asked, self.answered, self.resumed, self.resumes, self.turned_away, self.cut_off
        return *told, lost, wrong


class Load(Clients):
    """Clients that ask for all kinds of answers.

    Args:
        stack: It runs.
        seed: What they draw from.
        undisturbed: What each request of the catalogue is answered.

    Attributes:
        tallies: What became of the requests.
        broken: What went wrong with the clients themselves.
        gateway_killed: When a gateway was killed last, in monotonic seconds.
        told_s: The longest that a client of a killed gateway did not know it.
    """

    stop_s = CELL_S

    def __init__(
        self,
        stack: RestartingStack,
        seed: int,
        requests: dict[Kind, list[GenerateRequest]],
        undisturbed: dict[Kind, list[Heard]],
    ) -> None:
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self.broken: list[str] = []
        self.gateway_killed = 0.0
        self.told_s = 0.0
        self._stack = stack
        self._requests = requests
        self._undisturbed = undisturbed
        self._lock = threading.Lock()
        super().__init__(
            threading.Thread(target=self._run, args=(random.Random(seed + number),), name=f"client-{number}")
            for number in range(CLIENTS)
        )

    def __exit__(self, *_: object) -> None:
        self.broken += [f"{each.name} ended before its time" for each in self._threads if not each.is_alive()]
        super().__exit__()
        self.broken += [f"{each.name} has not ended" for each in self._threads if each.is_alive()]

    def _run(self, chance: random.Random) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    with (
                        Client(self._stack.address, reconnect_s=0) as client,
                        Watcher(self._stack) as watcher,
                    ):
                        while not self._stopping.is_set() and self._ask(client, watcher, chance):
                            pass
                except GatewayUnreachableError:
                    # Its successor is not there yet.
                    self._stopping.wait(0.2)
        except (OmniRelayError, OSError) as error:
            self.broken.append(f"a client ended: {type(error).__name__}: {error}")

    def _ask(self, client: Client, watcher: Watcher, chance: random.Random) -> bool:
        """Ask for something; False if there is no gateway any more."""
        began = time.monotonic()
        kind, manner = chance.choice(list(self._requests)), chance.choice(MANNERS)
        number = chance.randrange(len(self._requests[kind]))
        request = self._requests[kind][number]
        turned_away = 0
        while True:
            heard = Heard()
            if manner == "cancelled":
                name = hear_a_part(client, request, heard, chance)
            elif manner == "left":
                name = leave(self._stack.address, request, heard, chance)
            elif manner == "slowly":
                name = read_slowly(self._stack.address, request, heard)
            else:
                name = listen(client, request, heard)
            if name is not None or not isinstance(heard.error, StageUnavailableError | BusyError):
                break
            turned_away += 1
            if self._stopping.wait(0.2):
                return True
        what = f"{kind}{_HOW.get(manner, '')}"
        if isinstance(heard.error, GatewayUnreachableError) and self._note_cut_off(
            what, taken=name is not None, began=began, slow=manner == "slowly"
        ):
            return False
        resumes = _resumes(watcher, name) if name else 0
        self._note(what, heard, self._undisturbed[kind][number], resumes, turned_away)
        return not isinstance(heard.error, GatewayUnreachableError)

    def _note_cut_off(self, what: str, taken: bool, began: float, slow: bool) -> bool:
        """Note a request that had no answer for want of a gateway; False if there was one all the time."""
        killed = self.gateway_killed
        with self._lock:
            if not taken:
                self.tallies[what].turned_away += 1
                return True
            if killed < began:
                return False
            self.tallies[what].asked += 1
            self.tallies[what].cut_off += 1
            # Who reads slowly has yet to read what was on its way.
            if not slow:
                self.told_s = max(self.told_s, time.monotonic() - killed)
        return True

    def _note(self, what: str, heard: Heard, expected: Heard, resumes: int, turned_away: int) -> None:
        wrong: list[str] = []
        if heard.error is None:
            wrong = heard.differences(expected) if heard.ended else heard.departures(expected)
        with self._lock:
            tally = self.tallies[what]
            tally.asked += 1
            tally.resumes += resumes
            tally.resumed += resumes > 0
            tally.turned_away += turned_away
            if heard.error is not None:
                tally.lost.append(f"{heard.error.code}: {heard.error}")
            elif wrong:
                tally.wrong += wrong[:1]
            else:
                tally.answered += 1


def soak(
    model: Path,
    folder: Path,
    chance: random.Random,
    seconds: float,
    replicas: int,
    among: Collection[Target] = TARGETS,
) -> tuple[list[object], list[str]]:
    """Run it.

    Args:
        model: The checkpoint.
        folder: For configuration and logs.
        chance: What is drawn.
        seconds: How long.
        replicas: Of each stage.
        among: The processes to which something happens.

    Returns:
        The tables, and what was wrong, a line each.
    """
    requests = catalogue()
    with RestartingStack(model, folder, replicas) as stack:
        undisturbed: dict[Kind, list[Heard]] = {}
        with Client(stack.address) as client:
            for _ in range(2):
                undisturbed = {
                    kind: [_hear(client, each) for each in some] for kind, some in requests.items()
                }
        before = footprints(stack)
        with MemoryWatch(stack) as memory:
            with Load(stack, chance.randrange(2**32), requests, undisturbed) as load:
                strikes: Counter[str] = Counter()
                try:
                    _strike(stack, chance, time.monotonic() + seconds, strikes, load, among)
                except (TimeoutError, AssertionError, OmniRelayError, OSError) as error:
                    load.broken.append(f"it was ended early: {type(error).__name__}: {error}")
            left = leaks(stack, before)
    trends = memory.trends()
    tallies = load.tallies
    wrong = [f"{what}: {why}" for what, each in tallies.items() for why in (*each.lost, *each.wrong)]
    if load.told_s > CLEAN_S:
        wrong.append(f"a client of a killed gateway did not know it for {load.told_s:.1f} s")
    wrong += load.broken + left + [f"the memory of {each.name} grew" for each in trends if not each.flat]
    memory_rows: list[list[Cell]] = [
        [
            *(each.name, each.incarnations, _mib(each.first), _mib(each.last), _mib(each.most)),
            "flat" if each.flat else "**grew**",
        ]
        for each in trends
    ]
    thirds = [f"{each}, MiB" for each in ("first third", "last third", "most")]
    parts = [
        f"{seconds / 60:.0f} minutes, {CLIENTS} clients, {replicas} replica(s) of each stage.",
        _requests_table(tallies),
        Table(title="What happened", columns=["", "times"], rows=list(map(list, sorted(strikes.items())))),
        f"Clients of a killed gateway knew it after {load.told_s:.2f} s at most.",
        _aborts_table(stack.log("gateway")),
        Table(title="Memory", columns=["process", "incarnations", *thirds, ""], rows=memory_rows),
        f"Flat: the last third's median is at most {GROWTH - 1:.0%} and {SPARE // MIB} MiB over the first's.",
    ]
    return parts, [f"- {each}" for each in wrong]


def _hear(client: Client, request: GenerateRequest) -> Heard:
    heard = Heard()
    listen(client, request, heard)
    if heard.error is not None:
        raise heard.error
    return heard


def _resumes(watcher: Watcher, name: str) -> int:
    """How often a request was begun anew, as far as its gateway is there to tell."""
    try:
        resumes: int = watcher.report(name).get("resumes", 0)
    except OSError:
        return 0
    return resumes


def _strike(
    stack: RestartingStack,
    chance: random.Random,
    until: float,
    count: Counter[str],
    load: Load,
    among: Collection[Target],
) -> None:
    """Let something happen every now and then, and count it."""
    while True:
        pause = chance.uniform(*STRIKES_S)
        if time.monotonic() + pause > until:
            time.sleep(max(0.0, until - time.monotonic()))
            return
        time.sleep(pause)
        target = chance.choice([each for each in TARGETS if each in among])
        fault = chance.choice(GATEWAY_STRIKES if target == "gateway" else STAGE_STRIKES)
        deaths = len(stack.deaths)
        if target == "gateway" and fault == "kill":
            load.gateway_killed = time.monotonic()
        done = strike(stack, target, fault, chance)
        count[f"{target}, {MEANING[fault]}"] += 1
        print(f"{until - time.monotonic():6.0f} s left: {target}, {MEANING[fault]}", flush=True)
        done.rest.result(CELL_S)
        if done.dies:
            wait_until(lambda before=deaths: len(stack.deaths) > before, "the process ends", CELL_S)  # type: ignore[misc]
        wait_until(stack.all_ready, "all replicas are ready again", CELL_S)


def _requests_table(tallies: dict[str, Tally]) -> Table:
    figures_of = {what: each.figures for what, each in sorted(tallies.items())}
    figures_of["**together**"] = tuple(map(sum, zip(*figures_of.values(), strict=True)))
    columns = ["requests", "asked", "as undisturbed", "begun anew", "how often", "turned away"]
    rows: list[list[Cell]] = [[what, *each] for what, each in figures_of.items()]
    return Table(title="Requests", columns=[*columns, "gateway killed", "lost", "wrong"], rows=rows)


def _aborts_table(log: str) -> Table:
    """How soon the stages had dropped what clients gave up, frozen and dying ones included.

    By the state in which clients gave requests up, of a gateway's log.  A request that waited in line is at
    no stage, and not told.
    """
    dropped_after = dict(_DROPPED.findall(log))
    found: dict[str, list[float]] = defaultdict(list)
    for name, state in _GIVEN_UP.findall(log):
        # Of several attempts the last one; those before were not given up by a client.
        if name in dropped_after:
            found[state].append(float(dropped_after[name]))
    rows = [[state, *figures(seconds)] for state, seconds in sorted(found.items())]
    return Table(title="Given up", columns=["while", *FIGURES], rows=rows)


def _mib(size: float | None) -> str:
    return "" if size is None else f"{size / MIB:,.0f}"
