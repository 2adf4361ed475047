"""What is done in a run, one thing after the other."""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from benchmarks.adapters.base import Adapter
from benchmarks.adapters.transformers import Transformers
from benchmarks.answer import Answer
from benchmarks.load import Load, run_load
from benchmarks.output import tell
from benchmarks.results import Agreement, FirstAudio
from benchmarks.workload import Workload, answer_of

CONCURRENCY = "concurrency"
ALONE, AMONG = "alone", "among long ones"
SHORT, LONG = "a short answer", "a long answer"
LONG_CLIENTS = 8
_FRESH_PROMPTS = 100_000
"""Prompts from here on are used once, by measurements whose answers are not compared."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done.

    Attributes:
        seconds: Length of an answer's speech.
        levels: Clients at once.
        rounds: Requests of each client; at one client at least three.
        repeats: How often everything is done.
        references: Requests of transformers in each repeat.
        long_s: Length of long answers.
        short_s: Length of short answers.
        probes: Measurements of the time to first audio under each condition, in each repeat.
    """

    seconds: float
    levels: list[int]
    rounds: int = 1
    repeats: int = 2
    references: int = 2
    long_s: float = 60.0
    short_s: float = 3.0
    probes: int = 2

    @property
    def workload(self) -> Workload:
        """What is asked under load."""
        return answer_of(self.seconds)


class Compared:
    """Holds answers against transformers'."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._references: dict[int, Answer] = {}
        self._others: list[tuple[str, Answer]] = []

    def add(self, adapter: str, where: str, answers: Iterable[Answer]) -> None:
        """Note answers; those of transformers are what the others are held against."""
        if adapter == Transformers.name:
            self._references |= {answer.index: answer for answer in answers}
        else:
            self._others += [(f"{adapter}, {where}", answer) for answer in answers]

    def agreement(self) -> Agreement:
        """What was found."""
        unequal = []
        for who, answer in [*self._others, *(("transformers", each) for each in self._references.values())]:
            told = (len(answer.text_ids), len(answer.codec_ids))
            if told != (self._workload.text_tokens, self._workload.codec_tokens):
                unequal.append(f"{who}, prompt {answer.index}: {told} tokens of text and speech")
        pairs = [
            (who, answer, self._references[answer.index])
            for who, answer in self._others
            if answer.index in self._references
        ]
        for who, answer, reference in pairs:
            for what in ("text_ids", "codec_ids", "samples"):
                if getattr(answer, what) != getattr(reference, what):
                    unequal.append(f"{who}, prompt {answer.index}: {_difference(what, answer, reference)}")
        return Agreement(compared=len(pairs), unequal=unequal)


def _difference(what: str, answer: Answer, reference: Answer) -> str:
    if what == "samples":
        return f"{answer.samples} samples, transformers {reference.samples}"
    ours: Sequence[int] = getattr(answer, what)
    theirs: Sequence[int] = getattr(reference, what)
    first = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    return f"{what} differ from transformers' at {first} of {len(theirs)}"


async def warm_up(adapters: Sequence[Adapter], plan: Plan) -> None:
    """Let everybody answer once, and throw it away."""
    for adapter in adapters:
        tell(f"warm-up: {adapter.name}")
        at_once = 1 if adapter.name == Transformers.name else max(plan.levels)
        indices = range(_FRESH_PROMPTS - at_once, _FRESH_PROMPTS)
        await run_load(adapter, answer_of(1.0), indices, at_once, scenario="warm-up")


async def choose_threads(reference: Transformers) -> None:
    """Give transformers the number of threads with which it is faster on this machine: one, or all cores."""
    candidates = sorted({1, reference.threads})
    walls: dict[int, float] = dict.fromkeys(candidates, 0.0)
    for order in (candidates, candidates[::-1]):
        for threads in order:
            reference.threads = threads
            load, _ = await run_load(reference, answer_of(1.0), [0], 1, scenario="threads")
            walls[threads] += load.wall_s
    reference.threads = min(candidates, key=walls.__getitem__)
    told = ", ".join(f"{threads}: {wall / 2:.2f} s" for threads, wall in walls.items())
    tell(f"transformers, an answer of 1 s by threads: {told}; takes {reference.threads}")


async def concurrency(adapters: Sequence[Adapter], plan: Plan, compared: Compared) -> list[Load]:
    """Let more and more clients ask at once; transformers answers one after another.

    The order of the servers alternates from repeat to repeat.  The first prompts of each load are those that
    transformers has in the same repeat, so that answers can be compared at each level; all others are new.
    """
    loads = []
    fresh = plan.repeats * plan.references
    for repeat in range(plan.repeats):
        shared = list(range(repeat * plan.references, (repeat + 1) * plan.references))
        for adapter in adapters if repeat % 2 == 0 else adapters[::-1]:
            for level in [1] if adapter.name == Transformers.name else plan.levels:
                count = max(level * plan.rounds, plan.references if adapter.name == Transformers.name else 3)
                indices = shared[:count]
                missing = 0 if adapter.name == Transformers.name else count - len(indices)
                indices += range(fresh, fresh + missing)
                fresh += missing
                load, answers = await run_load(
                    adapter, plan.workload, indices, level, scenario=CONCURRENCY, repeat=repeat
                )
                compared.add(adapter.name, f"{level} at once", answers)
                loads.append(load)
                tell(
                    f"repeat {repeat + 1}, {adapter.name}, {level} at once: "
                    f"{load.requests_per_s:.3f} requests/s, {load.wall_s:.1f} s"
                )
    return loads


async def first_audio(adapter: Adapter, plan: Plan) -> list[FirstAudio]:
    """Times to first audio: of a long and a short answer, alone and while long ones are made."""
    prompts = iter(range(_FRESH_PROMPTS, 2 * _FRESH_PROMPTS))
    found: dict[str, list[float]] = {SHORT: [], LONG: [], ALONE: [], AMONG: []}
    conditions = [(SHORT, plan.short_s), (LONG, plan.long_s), (ALONE, plan.seconds)]
    for repeat in range(plan.repeats):
        for probe in range(plan.probes):
            for name, seconds in conditions if (repeat + probe) % 2 == 0 else conditions[::-1]:
                found[name].append(await _first_audio(adapter, answer_of(seconds), next(prompts)))
        found[AMONG] += await _among_long_ones(adapter, plan, prompts)
    for name, seconds_each in found.items():
        tell(f"time to first audio, {name}: {', '.join(f'{each:.3f}' for each in seconds_each)} s")
    return [FirstAudio(condition=name, seconds=seconds) for name, seconds in found.items()]


async def _among_long_ones(adapter: Adapter, plan: Plan, prompts: Iterable[int]) -> list[float]:
    """Ask while long answers are being made, all of which have begun to sound."""
    async with asyncio.TaskGroup() as group:
        heard: list[asyncio.Future[float]] = []
        tasks = []
        for index, _ in zip(prompts, range(LONG_CLIENTS), strict=False):
            heard.append(asyncio.get_running_loop().create_future())
            tasks.append(group.create_task(adapter.answer(answer_of(plan.long_s), index, heard[-1])))
        await asyncio.gather(*heard)
        times = []
        for index, _ in zip(prompts, range(plan.probes), strict=False):
            times.append(await _first_audio(adapter, answer_of(plan.seconds), index))
            if any(task.done() for task in tasks):
                raise RuntimeError("a long answer ended before the newcomers were heard: make it longer")
        for task in tasks:
            task.cancel()
    return times


async def _first_audio(adapter: Adapter, workload: Workload, index: int) -> float:
    """Ask, and hang up at the first audio."""
    heard: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(adapter.answer(workload, index, heard))
    task.add_done_callback(lambda _: heard.cancel())
    try:
        return await heard
    except asyncio.CancelledError:
        # It ended before anything was heard: say why.
        await task
        raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
