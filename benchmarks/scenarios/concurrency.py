"""Loads of more and more clients, beside transformers; and times to first audio."""

import asyncio
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from benchmarks.adapters.base import Adapter
from benchmarks.adapters.transformers import Transformers
from benchmarks.measure.answer import MeasuredAnswer
from benchmarks.measure.load import CONCURRENCY, FEWEST, Load, run_load
from benchmarks.measure.results import Measured, tell
from benchmarks.measure.workload import QWEN2_5, Speech, Workload, answer_of
from omnirelay.errors import OmniRelayError

ALONE, AMONG = "alone", "among long ones"
SHORT, LONG = "a short answer", "a long answer"
TTFA: Final = "first audio, s"
LONG_CLIENTS: Final = 8
_FRESH_PROMPTS: Final = 100_000
"""Prompts from here on are used once, by measurements whose answers are not compared."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done.

    Attributes:
        seconds: Length of an answer's speech.
        levels: Clients at once.
        rounds: Requests of each client; a load has at least :data:`FEWEST`.
        repeats: How often everything is done.
        references: Requests of transformers in each repeat.
        long_s: Length of long answers.
        short_s: Length of short answers.
        probes: Measurements of the time to first audio under each condition, in each repeat.
        speech: How the checkpoint speaks.
    """

    seconds: float
    levels: list[int]
    rounds: int = 1
    repeats: int = 2
    references: int = 2
    long_s: float = 60.0
    short_s: float = 3.0
    probes: int = 2
    speech: Speech = QWEN2_5

    @property
    def workload(self) -> Workload:
        """What is asked under load."""
        return self.answer_of(self.seconds)

    def answer_of(self, seconds: float) -> Workload:
        """A request whose answer is speech of this length."""
        return answer_of(seconds, self.speech)


class Compared:
    """Compares answers with transformers'."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._references: dict[int, MeasuredAnswer] = {}
        self._others: list[tuple[str, MeasuredAnswer]] = []

    def add(self, adapter: str, where: str, answers: Iterable[MeasuredAnswer]) -> None:
        """Note answers; those of transformers are what the others are compared with."""
        if adapter == Transformers.name:
            self._references |= {answer.index: answer for answer in answers}
        else:
            self._others += [(f"{adapter}, {where}", answer) for answer in answers]

    @property
    def count(self) -> int:
        """Answers of others that transformers has, too."""
        return sum(answer.index in self._references for _, answer in self._others)

    def unequal(self) -> Iterator[str]:
        """Say what differs."""
        references = [(Transformers.name, each) for each in self._references.values()]
        for who, answer in [*self._others, *references]:
            lengths = (len(answer.text_ids), len(answer.codec_ids))
            codes = self._workload.codec_tokens * self._workload.speech.groups
            if lengths != (self._workload.text_tokens, codes):
                yield f"{who}, prompt {answer.index}: {lengths} tokens of text and speech"
        for who, answer in self._others:
            reference, where = self._references.get(answer.index, answer), f"{who}, prompt {answer.index}"
            for what in ("text_ids", "codec_ids"):
                ours, theirs = getattr(answer, what), getattr(reference, what)
                if ours != theirs:
                    pairs = enumerate(zip(ours, theirs, strict=False))
                    first = next((at for at, (a, b) in pairs if a != b), None)
                    yield f"{where}: {what} differ from transformers' at {first} of {len(theirs)}"
            if answer.samples != reference.samples:
                yield f"{where}: {answer.samples} samples, transformers {reference.samples}"


async def warm_up(adapters: Sequence[Adapter], plan: Plan) -> None:
    """Let every server answer once, and drop the figures."""
    for adapter in adapters:
        tell(f"warm-up: {adapter.name}")
        at_once = 1 if adapter.name == Transformers.name else max(plan.levels)
        indices = range(_FRESH_PROMPTS - at_once, _FRESH_PROMPTS)
        await run_load(adapter, plan.answer_of(1.0), indices, at_once, scenario="warm-up")


async def choose_threads(reference: Transformers, plan: Plan) -> dict[int, float]:
    """Give transformers the number of threads with which it is faster on this machine: one, or all cores.

    Returns:
        Seconds of an answer of a second, by threads.
    """
    candidates = sorted({1, reference.threads})
    walls: dict[int, float] = dict.fromkeys(candidates, math.inf)
    for order in (candidates, candidates[::-1]):
        for threads in order:
            reference.threads = threads
            load, _ = await run_load(reference, plan.answer_of(1.0), [0], 1, scenario="threads")
            walls[threads] = min(walls[threads], load.wall_s)
    reference.threads = min(candidates, key=walls.__getitem__)
    tell(f"transformers, an answer of 1 s, seconds by threads: {walls}; takes {reference.threads}")
    return walls


async def concurrency(adapters: Sequence[Adapter], plan: Plan, compared: Compared) -> list[Load]:
    """Let more and more clients ask at once; transformers answers one after another, in between.

    The order is turned round from repeat to repeat.  The first prompts of each load are those that
    transformers has in the same repeat, so that answers can be compared at each level; all others are new.
    """
    loads = []
    fresh = itertools.count(plan.repeats * plan.references)
    for repeat in range(plan.repeats):
        shared = range(repeat * plan.references, (repeat + 1) * plan.references)
        turns = _turns(adapters, plan, shared)
        for adapter, level, indices, count in turns if repeat % 2 == 0 else turns[::-1]:
            prompts = [*indices, *itertools.islice(fresh, count - len(indices))]
            load, answers = await run_load(
                adapter, plan.workload, prompts, level, scenario=CONCURRENCY, repeat=repeat
            )
            compared.add(adapter.name, f"{level} at once", answers)
            loads.append(load)
            tell(
                f"{adapter.name}, {level} at once: {load.requests_per_s:.3f} requests/s, {load.wall_s:.1f} s"
            )
    return loads


def _turns(
    adapters: Sequence[Adapter], plan: Plan, shared: Sequence[int]
) -> list[tuple[Adapter, int, Sequence[int], int]]:
    """A repeat's loads: server, clients, the prompts that are compared, and the number of all."""
    turns: list[tuple[Adapter, int, Sequence[int], int]] = []
    for adapter in adapters:
        if adapter.name == Transformers.name:
            # Spread over the others: what else the machine does meanwhile hits all alike.
            for place, index in enumerate(shared):
                turns.insert(place + place * len(plan.levels) // len(shared), (adapter, 1, [index], 1))
        else:
            for level in plan.levels:
                count = max(level * plan.rounds, FEWEST)
                turns.append((adapter, level, shared[:count], count))
    return turns


async def first_audio(adapter: Adapter, plan: Plan) -> list[Measured]:
    """Times to first audio: of a long and a short answer, alone and while long ones are made."""
    prompts = iter(range(_FRESH_PROMPTS, 2 * _FRESH_PROMPTS))
    found: dict[str, list[float]] = {SHORT: [], LONG: [], ALONE: [], AMONG: []}
    conditions = [(SHORT, plan.short_s), (LONG, plan.long_s), (ALONE, plan.seconds)]
    for repeat in range(plan.repeats):
        for probe in range(plan.probes):
            for name, seconds in conditions if (repeat + probe) % 2 == 0 else conditions[::-1]:
                found[name].append(await _first_audio(adapter, plan.answer_of(seconds), next(prompts)))
        found[AMONG] += await _among_long_ones(adapter, plan, prompts)
    return [Measured(name, {TTFA: seconds}) for name, seconds in found.items()]


async def _among_long_ones(adapter: Adapter, plan: Plan, prompts: Iterator[int]) -> list[float]:
    """Ask while long answers are being made, of all of which the first audio has come.

    Raises:
        OmniRelayError: A request failed, or a long answer was not long enough.
    """
    long_ones = [_begin(adapter, plan.answer_of(plan.long_s), next(prompts)) for _ in range(LONG_CLIENTS)]
    try:
        await asyncio.gather(*(heard for _, heard in long_ones))
        times = [await _first_audio(adapter, plan.workload, next(prompts)) for _ in range(plan.probes)]
        if any(task.done() for task, _ in long_ones):
            raise OmniRelayError(f"an answer of {plan.long_s:g} s ended before the newcomers were heard")
    finally:
        await _hang_up(task for task, _ in long_ones)
    return times


async def _first_audio(adapter: Adapter, workload: Workload, index: int) -> float:
    """Ask, and hang up at the first audio."""
    task, heard = _begin(adapter, workload, index)
    try:
        return await heard
    finally:
        await _hang_up([task])


def _begin(
    adapter: Adapter, workload: Workload, index: int
) -> tuple[asyncio.Task[MeasuredAnswer], asyncio.Future[float]]:
    """Ask; gives the request, and its time to first audio when it is known."""
    heard: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def ended(task: asyncio.Task[MeasuredAnswer]) -> None:
        if not heard.done():
            error = None if task.cancelled() else task.exception()
            heard.set_exception(error or OmniRelayError("the answer ended before anything was heard"))

    task = asyncio.create_task(adapter.answer(workload, index, heard))
    task.add_done_callback(ended)
    return task, heard


async def _hang_up(tasks: Iterable[asyncio.Task[MeasuredAnswer]]) -> None:
    """Cancel requests, and wait until nothing is left of them here."""
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
