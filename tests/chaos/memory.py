"""Resident memory over time, process by process."""

import statistics
import threading
import time
from collections import defaultdict
from typing import Final, NamedTuple, Self

import psutil

from tests.support.restarting import RestartingStack

EVERY_S: Final = 1.0
SETTLED_S: Final = 15.0
"""A process that is younger still fills its caches."""
GROWTH: Final = 1.10
SPARE: Final = 16 * 2**20
"""Most by which the median of the last third may exceed that of the first: a tenth, and 16 MiB."""


class Sample(NamedTuple):
    """A process at one moment.

    Attributes:
        at: Monotonic seconds.
        pid: Its id: a process that was started again is another one.
        resident: Its resident memory and that of its children, in bytes.
    """

    at: float
    pid: int
    resident: int


class Trend(NamedTuple):
    """What became of the memory of a process and its successors.

    Attributes:
        name: Which process.
        incarnations: How many there were.
        first: Median of the first third of the time, in bytes; none without samples.
        last: The same of the last third.
        most: The greatest of all.
    """

    name: str
    incarnations: int
    first: float | None
    last: float | None
    most: int

    @property
    def flat(self) -> bool:
        """It did not grow by more than is allowed."""
        return self.first is None or self.last is None or self.last <= self.first * GROWTH + SPARE


class MemoryWatch(threading.Thread):
    """Takes samples of all processes of a stack while it is entered."""

    def __init__(self, stack: RestartingStack) -> None:
        super().__init__(name="memory", daemon=True)
        self._stack = stack
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()

    def run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            for name, pid in self._stack.pids().items():
                resident = _resident(pid)
                if resident:
                    self._samples[name].append(Sample(time.monotonic(), pid, resident))

    def trends(self) -> list[Trend]:
        """What became of each."""
        return [trend(name, samples) for name, samples in sorted(self._samples.items())]


def _resident(pid: int) -> int:
    """Bytes of a process and its children; 0 of one that ends just now."""
    try:
        process = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def trend(name: str, samples: list[Sample]) -> Trend:
    """What became of the memory of a process and its successors, from samples in their order."""
    born: dict[int, float] = {}
    for sample in samples:
        born.setdefault(sample.pid, sample.at)
    begin, end = samples[0].at, samples[-1].at
    third = (end - begin) / 3
    # The first of all was there, and warm, before.
    grown = [each for each in samples if each.at - born[each.pid] > SETTLED_S or born[each.pid] == begin]
    first = [each.resident for each in grown if each.at < begin + third]
    last = [each.resident for each in grown if each.at > end - third]
    return Trend(
        name,
        len(born),
        statistics.median(first) if first else None,
        statistics.median(last) if last else None,
        max(each.resident for each in samples),
    )
