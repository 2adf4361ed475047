"""What the processes hold when nobody asks anything of them, and whether that is more than it was."""

import time
from dataclasses import dataclass
from typing import Final

import psutil

from shared.config import Config
from tests.support.http import Readings, get
from tests.support.restarting import RestartingStack, settled

SETTLE_S: Final = 30.0
DESCRIPTORS: Final = 6
"""How many descriptors more than before a process may have: a heartbeat or a scrape is always under way."""
GROWTH: Final = 1.25
"""Most that resident memory may grow by, against what the process or its predecessor had at the beginning,"""
SPARE: Final = 48 * 2**20
"""and what is added to that."""
MIB: Final = 2**20


@dataclass(frozen=True)
class Footprint:
    """One process.

    Attributes:
        descriptors: Open files and sockets.
        children: Processes that it has started.
        resident: Its resident memory, in bytes.
    """

    descriptors: int
    children: int
    resident: int

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        """Look at a process."""
        process = psutil.Process(pid)
        return cls(process.num_fds(), len(process.children(recursive=True)), process.memory_info().rss)

    def exceeds(self, before: "Footprint", children: int = 0) -> list[str]:
        """What is more than it was, and more children than there may be."""
        most = int(before.resident * GROWTH) + SPARE
        most_children = max(before.children, children)
        found = {
            f"{self.descriptors} descriptors after {before.descriptors}": (
                self.descriptors > before.descriptors + DESCRIPTORS
            ),
            f"{self.children} children after {before.children}": self.children > most_children,
            f"{self.resident // MIB} MiB after {before.resident // MIB}": self.resident > most,
        }
        return [what for what, is_so in found.items() if is_so]


def footprints(stack: RestartingStack) -> dict[str, Footprint]:
    """All processes, by name."""
    return {name: Footprint.of(pid) for name, pid in stack.pids().items()}


def held(stack: RestartingStack) -> list[str]:
    """What stages and gateway say that they hold."""
    found = [f"{what}: {value}" for what, value in settled(stack).items()]
    for stage in stack.names:
        name = stage.partition(" ")[0]
        if name == "gateway":
            continue
        told = get(stack.addresses(stage)["http"], "/metrics").metrics
        read = Readings(told.values())
        names = {
            "omnirelay_stage_held_bytes",
            "omnirelay_conditioning_rows_held",
            "omnirelay_kv_cache_usage_ratio",
        }
        values = {each: read(each, stage=name) for each in names if read.has(each, stage=name)}
        for state in ("running", "waiting"):
            values[state] = read("omnirelay_stage_requests", stage=name, state=state)
        for sample in told["omnirelay_edge_backlog_bytes"].samples:
            values[f"backlog to {sample.labels['edge']}"] = sample.value
        found += [f"{stage}: {what} is {value:g}" for what, value in values.items() if value]
    return found


def leaks(stack: RestartingStack, before: dict[str, Footprint]) -> list[str]:
    """What is still there, half a minute after it should be gone; nothing if all is well.

    Args:
        stack: Nobody asks anything of it.
        before: What its processes had at the beginning.
    """
    until = time.monotonic() + SETTLE_S
    while True:
        found = _leaks(stack, before)
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.2)


def _leaks(stack: RestartingStack, before: dict[str, Footprint]) -> list[str]:
    if not stack.all_ready():
        return ["not all replicas are ready, or one that is gone is still told of"]
    found = held(stack)
    # They are started when there are files for so many, and kept.
    decoders = Config().media.decoders
    for name, now in footprints(stack).items():
        children = decoders if name.startswith("thinker") else 0
        found += [f"{name}: {what}" for what in now.exceeds(before[name], children)]
    own = {child.pid for child in psutil.Process().children()}
    strangers = own - set(stack.pids().values())
    return found + [f"process {pid} is nobody's" for pid in strangers]
