"""How long stages hold something of requests that nobody wants any more."""

import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from omnirelay import Client, GenerateRequest, SamplingOverrides
from tests.chaos.cells import CELL_S, QUEUED, STATES, Watcher
from tests.chaos.leaks import held
from tests.chaos.report import table
from tests.chaos.streams import Stream, request_for
from tests.support.processes import wait_until
from tests.support.restarting import STREAMS, RestartingStack, settled

Way = Literal["cancel", "disconnect", "deadline"]
WAYS: Final[tuple[Way, ...]] = ("cancel", "disconnect", "deadline")
ANY: Final = "any"
PROMISED_S: Final = 1.0
LATEST_S: Final = 2.5
"""Latest of the deadlines that are drawn; the earliest is a twentieth of it."""
LONG_PROMPT, LONG_TEXT, LONG_SPEECH = 3000, 200, 1000
"""Tokens of a long request: a prefill in pieces, and 20 s of speech, in half of them in one piece."""
FIGURES: Final = ("n", "P50", "P95", "most")
_GIVEN_UP: Final = re.compile(r"request (\w+) (?:cancelled|expired) from (\w+): ")
_DROPPED: Final = re.compile(r"request (\w+)(?:\.\d+)? was dropped by all its stages after ([\d.]+) s")


@dataclass
class Times:
    """How long it took for requests that were in one state when they ended, in seconds.

    Attributes:
        confirmed: From when the gateway gave a request up until its last stage had confirmed that.
        zero: From when the clients of eight streams gave them up, one of them in that state, until nothing of
            them was in any stage's metrics.
    """

    confirmed: list[float] = field(default_factory=list)
    zero: list[float] = field(default_factory=list)


def dropped(log: str) -> dict[str, list[float]]:
    """From a gateway's log, by the state in which clients gave requests up: seconds until all stages knew.

    A request that waited in line is at no stage, and not told.
    """
    dropped_after = dict(_DROPPED.findall(log))
    found: dict[str, list[float]] = defaultdict(list)
    for name, state in _GIVEN_UP.findall(log):
        # Of several attempts the last one; those before were not given up by a client.
        if name in dropped_after:
            found[state].append(float(dropped_after[name]))
    return found


def long_request(number: int) -> GenerateRequest:
    """One whose steps are long."""
    text, speech = (SamplingOverrides(max_tokens=most, min_tokens=most) for most in (LONG_TEXT, LONG_SPEECH))
    return GenerateRequest(
        prompt_token_ids=[number + 1] * LONG_PROMPT,
        seed=number,
        streaming=number % 2 == 0,
        text_sampling=text,
        codec_sampling=speech,
    )


def measure(
    model: Path, folder: Path, chance: random.Random, rounds: int, long: bool = False
) -> tuple[str, bool]:
    """End eight streams together, in every way and state.

    Args:
        model: The checkpoint.
        folder: For configuration and logs.
        chance: What is drawn.
        rounds: How often for each way and state.
        long: Take requests whose steps are long.

    Returns:
        The table, and whether all was as promised.
    """
    times: dict[tuple[Way, str], Times] = defaultdict(Times)
    with RestartingStack(model, folder) as stack:
        for number, way in [(number, way) for number in range(rounds) for way in WAYS]:
            for state in STATES:
                before = len(stack.log("gateway"))
                zero_s = _end(stack, chance, way, state, long)
                if zero_s is None:
                    continue
                # Deadlines pass in whatever state a request is.
                times[way, ANY if way == "deadline" else state].zero.append(zero_s)
                for reached, seconds in dropped(stack.log("gateway")[before:]).items():
                    times[way, reached].confirmed += seconds
            print(f"round {number + 1} of {rounds}: {way}", flush=True)
    rows = [
        [way, state, *figures(times[way, state].confirmed), *figures(times[way, state].zero)]
        for way in WAYS
        for state in (*STATES, ANY)
        if (way, state) in times
    ]
    head = ["given up by", "while", *(f"{what}, {each}" for what in ("confirmed", "0") for each in FIGURES)]
    worst = max((each for one in times.values() for each in (*one.confirmed, *one.zero)), default=0.0)
    return table(head, rows, 2), worst < PROMISED_S


def _end(stack: RestartingStack, chance: random.Random, way: Way, state: str, long: bool) -> float | None:
    """Let eight streams end; gives the seconds until nothing was left, none if they were too quick."""
    numbers = range(QUEUED + 1 if state == "queued" else STREAMS)
    make = long_request if long else request_for
    requests = [make(number) for number in numbers]
    if way == "deadline":
        due_s = chance.uniform(LATEST_S / 20, LATEST_S)
        requests = [msgspec.structs.replace(each, deadline_s=due_s) for each in requests]
    with ExitStack() as open_ones, Watcher(stack) as watcher:
        clients = [open_ones.enter_context(Client(stack.address)) for _ in requests]
        streams = [
            Stream(client, number, request)
            for client, number, request in zip(clients, numbers, requests, strict=True)
        ]
        chosen = streams[-1] if state == "queued" else chance.choice(streams)
        if way != "deadline":
            reached = watcher.await_state(chosen, state)  # type: ignore[arg-type]  # one of STATES
            began = time.monotonic()
            for client, stream in zip(clients, streams, strict=True):
                if way == "cancel":
                    stream.cancel()
                else:
                    # Not its thread, on which the stream still listens.
                    client.call(client._client.close())
        for stream in streams:
            stream.result(time.monotonic() + CELL_S)
        if way == "deadline":
            reached, began = True, max(stream.heard.at[-1] for stream in streams)
        wait_until(lambda: not held(stack), "nothing is held", CELL_S)
        zero_s = time.monotonic() - began
    wait_until(lambda: not settled(stack), "the stack is at rest", CELL_S)
    return zero_s if reached else None


def figures(values: Iterable[float]) -> list[object]:
    """Number, median, 95th percentile and most of seconds, as a table's cells."""
    known = sorted(values)
    if not known:
        return [0, "", "", ""]
    shown = (statistics.median(known), known[int(0.95 * (len(known) - 1) + 0.5)], known[-1])
    return [len(known), *(f"{1000 * each:.0f} ms" for each in shown)]
