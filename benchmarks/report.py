"""A run as a page: figures with goals, and tables.

Figures are ratios within one run, made of medians, so that a single answer that the machine held up does not
decide.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from benchmarks.measure.counters import ACTIVITIES
from benchmarks.measure.load import CONCURRENCY, Load
from benchmarks.measure.results import Cell, RunResult, Table, as_table, mean, page, percentile
from benchmarks.scenarios.alone import BESIDE, COST, MEMORY
from benchmarks.scenarios.concurrency import ALONE, AMONG, LONG, SHORT, TTFA
from benchmarks.scenarios.hops import ALL

SERVERS: Final = ("transformers", "omnirelay")
OVERHEAD: Final = ("take", "engine", "send")
"""What a stage's loop does that is neither waiting nor the model's."""
TITLES: Final = {
    "first-audio": "Time to first audio",
    "hops": "A message's way between two processes",
    "synthesis": "token2wav alone, by the length of the stream",
    "floor": "A decoding step of one request",
    "real-time": "What listeners of the default checkpoint hear",
    "questions": "From the end of a spoken question to its answer",
}


class Figure(NamedTuple):
    """One figure; its goal is a lower bound with ``at_least``, else an upper one."""

    name: str
    value: float
    goal: float | None = None
    unit: str = "x"
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """Whether the goal is reached; empty without a goal."""
        if self.goal is None:
            return ""
        reached = self.value >= self.goal if self.at_least else self.value <= self.goal
        return "reached" if reached else "missed"


def loads_of(result: RunResult, adapter: str, clients: int | None = None) -> list[Load]:
    """The loads that are compared, of one server; at all numbers of clients, or at one."""
    return [
        load
        for load in result.loads
        if load.scenario == CONCURRENCY and load.adapter == adapter and clients in (None, load.clients)
    ]


def levels_of(result: RunResult, adapter: str) -> list[int]:
    """Numbers of clients at which a server was measured."""
    return sorted({load.clients for load in loads_of(result, adapter)})


def throughput(loads: list[Load]) -> float:
    """Requests a second over several loads."""
    return sum(len(load.answers) for load in loads) / sum(load.wall_s for load in loads)


def figures(result: RunResult) -> Iterator[Figure]:
    """All figures that the run allows; goals of ratios to transformers are those of ``bench``."""
    yield from _beside_transformers(result)
    yield from _of_load(result)
    measured = {name: {row.name: row for row in rows} for name, rows in result.measured.items()}
    if first := measured.get("first-audio"):
        for long, short, goal in ((LONG, SHORT, 1.1), (AMONG, ALONE, 3.0)):
            ratio = first[long].p50(TTFA) / first[short].p50(TTFA)
            yield Figure(f"time to first audio, {long} / {short}", ratio, goal)
    if streams := result.measured.get("synthesis"):
        costs = [row.p50(COST) for row in streams]
        name = "token2wav's cost per second of audio"
        yield Figure(f"{name}, longest / shortest stream", costs[-1] / costs[0], 1.1)
        yield Figure(f"{name}, largest / smallest over all lengths", max(costs) / min(costs), 1.1)
        memory = streams[-1].p50(MEMORY) / streams[0].p50(MEMORY)
        yield Figure("token2wav's peak memory, longest / shortest stream", memory, 1.1)
    if floor := measured.get("floor"):
        ratio = floor["talker"].p50(BESIDE) / floor["vllm"].p50(BESIDE)
        yield Figure("a decoding step beside its model, the talker's / bare vLLM's", ratio, 1.2)
    for number, hop in enumerate(result.measured.get("hops", [])):
        most = (0.3, 10.0, None, None, None)[number]
        yield Figure(f"a hop of {hop.name}, P50", hop.p50(ALL), most, "ms")


def _completion(loads: list[Load]) -> float:
    return percentile([answer.completion_s for load in loads for answer in load.answers], 0.5)


def _beside_transformers(result: RunResult) -> Iterator[Figure]:
    alone, reference = loads_of(result, "omnirelay", 1), loads_of(result, "transformers", 1)
    goals = result.checkpoint == "bench"
    if not reference:
        return
    whole = _completion(reference)
    if alone:
        heard = percentile([answer.ttfa_s for load in alone for answer in load.answers], 0.5)
        name = "transformers' completion, 1 client"
        yield Figure(f"time to first audio / {name}", heard / whole, 0.12 if goals else None)
        yield Figure(f"completion / {name}", _completion(alone) / whole, 0.7 if goals else None)
    for level in levels_of(result, "omnirelay"):
        rate = percentile([load.requests_per_s for load in loads_of(result, "omnirelay", level)], 0.5)
        name = f"requests/s / transformers', one after another, {level} client{'s' * (level > 1)}"
        yield Figure(name, rate * whole, 2.5 if goals and level == 8 else None, at_least=True)


def _of_load(result: RunResult) -> Iterator[Figure]:
    alone, eight, sixteen = (loads_of(result, "omnirelay", level) for level in (1, 8, 16))
    if eight and sixteen:
        rates = [percentile([load.requests_per_s for load in loads], 0.5) for loads in (eight, sixteen)]
        yield Figure("requests/s, 16 clients / 8 clients", rates[1] / rates[0], 1.0, at_least=True)
    if alone:
        # Of the stages' loops, and of the gateway's processor.
        spent = sum(
            load.cpu_s.get("gateway", 0.0)
            + sum(stage.seconds[activity] for stage in load.stages for activity in OVERHEAD)
            for load in alone
        )
        whole = sum(answer.completion_s for load in alone for answer in load.answers)
        goal = 5.0 if result.checkpoint == "bench" else None
        name = "all that is no model's, of the completion time, 1 client"
        yield Figure(name, 100 * spent / whole, goal, "%")


def report(result: RunResult) -> str:
    """The whole run as a page in Markdown."""
    parts: list[object] = []
    if result.loads:
        asked = result.loads[-1].workload
        parts.append(
            f"Checkpoint `{result.checkpoint}`, {result.parameters:.1f} million parameters, float32, greedy. "
            f"A request: {asked.prompt_tokens} prompt, {asked.text_tokens} text, {asked.codec_tokens} codec "
            f"tokens ({asked.seconds:g} s of speech)."
        )
    if result.reference_threads:
        walls = ", ".join(f"{threads}: {wall:.2f} s" for threads, wall in result.reference_threads.items())
        parts.append(f"transformers has the threads with which an answer of 1 s is fastest: {walls}.")
    if result.unequal:
        parts.append("\n".join(["**ANSWERS DIFFER:**", "", *(f"- {each}" for each in result.unequal)]))
    elif result.compared:
        parts.append(
            f"Answers compared with transformers': {result.compared}; text ids, codec ids and lengths of the "
            "waveform are equal in all."
        )
    if found := list(figures(result)):
        parts.append(_figures(found))
    parts += tables(result)
    parts += [as_table(TITLES[name], rows) for name, rows in result.measured.items()]
    return page(result.checkpoint, result.machine, parts)


def _figures(found: list[Figure]) -> Table:
    rows: list[list[Cell]] = [
        [
            each.name,
            f"{each.value:.3g} {each.unit}",
            "" if each.goal is None else f"{'≥' if each.at_least else '≤'} {each.goal:g} {each.unit}",
            each.verdict,
        ]
        for each in found
    ]
    return Table(title="Figures", columns=["figure", "value", "goal", ""], rows=rows)


def tables(result: RunResult) -> Iterator[Table]:
    """What the loads were like, by server and number of clients."""
    found = [
        (server, level, loads_of(result, server, level))
        for server in SERVERS
        for level in levels_of(result, server)
    ]
    if not found:
        return
    columns = [
        *("server", "clients", "n", "TTFT", "TTFA", "P95", "completion", "P50", "P95", "RTF"),
        *("requests/s", "least to most", "audio s/s", "underruns", "silent s", "others' CPU"),
    ]
    rows = [[server, level, *_load_cells(loads)] for server, level, loads in found]
    yield Table(title="Requests", columns=columns, rows=rows)
    rows = []
    for server, level, loads in found:
        peaks = {name: max(load.peak_memory[name] for load in loads) / 2**20 for name in loads[0].peak_memory}
        each = ", ".join(f"{name} {peak:,.0f}" for name, peak in peaks.items())
        rows.append([server, level, each, f"{sum(peaks.values()):,.0f}"])
    yield Table(title="Peak memory, MiB", columns=["server", "clients", "processes", "together"], rows=rows)
    if levels := levels_of(result, "omnirelay"):
        yield _stages(result, levels)


def _load_cells(loads: list[Load]) -> list[Cell]:
    answers = [answer for load in loads for answer in load.answers]
    completions, heard = [each.completion_s for each in answers], [each.ttfa_s for each in answers]
    rates = [load.requests_per_s for load in loads]
    return [
        len(answers),
        *(mean([each.ttft_s for each in answers]), mean(heard), percentile(heard, 0.95)),
        *(mean(completions), percentile(completions, 0.5), percentile(completions, 0.95)),
        *(mean([each.real_time_factor for each in answers]), throughput(loads)),
        f"{min(rates):.3g} to {max(rates):.3g}",
        sum(each.audio_s for each in answers) / sum(load.wall_s for load in loads),
        *(sum(each.underruns for each in answers), mean([each.stalled_s for each in answers])),
        f"{100 * mean([load.others_cpu for load in loads]):.0f}%",
    ]


def _stages(result: RunResult, levels: list[int]) -> Table:
    """What the time of each stage's loop goes to, for each request."""
    rows: list[list[Cell]] = []
    for level in levels:
        loads = loads_of(result, "omnirelay", level)
        requests = sum(len(load.answers) for load in loads)
        for same in zip(*(load.stages for load in loads), strict=True):
            steps = sum(each.steps for each in same)
            spent = [sum(each.seconds[activity] for each in same) / requests for activity in ACTIVITIES]
            batch = sum(each.mean_batch * each.steps for each in same) / max(1, steps)
            rows.append([level, same[0].name, *spent, steps / requests, batch])
    columns = ["clients", "stage", *ACTIVITIES, "steps", "mean batch"]
    return Table(title="Stages: seconds a request", columns=columns, rows=rows)
