"""A run in words: tables in Markdown."""

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.measure.load import Load
from benchmarks.measure.results import RunResult, mean, percentile
from benchmarks.measure.stages import ACTIVITIES
from benchmarks.report.figures import figures, levels_of, loads_of, throughput

_SERVERS = ("transformers", "omnirelay")


def report(result: RunResult) -> str:
    """The whole run."""
    sections = [_head(result), _agreement(result), *_tables(result)]
    return "\n\n".join(sections) + "\n"


def _head(result: RunResult) -> str:
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines = [f"# {result.checkpoint}", ""]
    lines += [
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, {machine.system}; {versions}.",
        f"Load average before the run: {machine.load}.",
        f"Real-time priority for what moves bytes, clients included: {'yes' if machine.real_time else 'no'}.",
    ]
    if result.loads:
        asked = result.loads[-1].workload
        lines.append(
            f"Checkpoint `{result.checkpoint}`, {result.parameters:.1f} million parameters, float32, greedy. "
            f"A request: {asked.prompt_tokens} prompt, {asked.text_tokens} text, {asked.codec_tokens} codec "
            f"tokens ({asked.seconds:g} s of speech)."
        )
    if result.threads is not None:
        told = ", ".join(f"{threads}: {wall:.2f} s" for threads, wall in result.reference_threads.items())
        lines.append(
            f"transformers computes with {result.threads} thread(s), the fastest of those tried "
            f"(an answer of 1 s by threads: {told})."
        )
    return "\n".join(lines)


def _agreement(result: RunResult) -> str:
    agreement = result.agreement
    if agreement.unequal:
        return "\n".join(["**ANSWERS DIFFER:**", "", *(f"- {each}" for each in agreement.unequal)])
    return (
        f"Answers compared with transformers': {agreement.compared}; text ids, codec ids and lengths of the "
        "waveform are equal in all."
    )


def _tables(result: RunResult) -> Iterator[str]:
    yield _figures(result)
    if any(loads_of(result, server) for server in _SERVERS):
        yield "## Requests\n\n" + _requests(result)
        yield "## Peak memory, MiB\n\n" + _memory(result)
    if parts := [load for load in loads_of(result, "transformers") if load.parts]:
        yield "## transformers: seconds a request\n\n" + _parts(parts)
    if loads_of(result, "omnirelay"):
        yield "## Stages: seconds a request\n\n" + stages(result)
        yield "## Edges, at the most clients\n\n" + _edges(result)
    if result.hops:
        yield "## A message's way between two processes, ms\n\n" + _hops(result)
    if result.first_audio:
        rows = [
            (
                each.condition,
                len(each.seconds),
                percentile(each.seconds, 0.5),
                min(each.seconds),
                max(each.seconds),
            )
            for each in result.first_audio
        ]
        yield "## Time to first audio, s\n\n" + _table(("answer", "n", "P50", "least", "most"), rows)
    if result.floor:
        rows = [
            (
                each.server,
                len(each.step_ms),
                percentile(each.step_ms, 0.5),
                percentile(each.model_ms, 0.5),
                each.beside_ms,
            )
            for each in result.floor
        ]
        head = ("server", "steps", "step", "model", "beside the model")
        yield "## A decoding step of one request, P50, ms\n\n" + _table(head, rows)
    if result.synthesis:
        yield "## token2wav alone\n\n" + _synthesis(result)


def _figures(result: RunResult) -> str:
    rows = [
        (
            figure.name,
            f"{figure.value:.3g} {figure.unit}",
            "" if figure.goal is None else f"{'≥' if figure.at_least else '≤'} {figure.goal:g} {figure.unit}",
            figure.verdict,
        )
        for figure in figures(result)
    ]
    return _table(("figure", "value", "goal", ""), rows)


def _requests(result: RunResult) -> str:
    head = (
        *("server", "clients", "n", "TTFT", "TTFA", "P95", "completion", "P50", "P95", "RTF"),
        *("requests/s", "least to most", "audio s/s", "underruns", "silent s", "others' CPU"),
    )
    rows = [
        _request_row(server, level, loads_of(result, server, level))
        for server in _SERVERS
        for level in levels_of(result, server)
    ]
    return _table(head, rows)


def _request_row(server: str, level: int, loads: list[Load]) -> tuple[object, ...]:
    answers = [answer for load in loads for answer in load.answers]
    completions = [answer.completion_s for answer in answers]
    heard = [answer.ttfa_s for answer in answers]
    rates = [load.requests_per_s for load in loads]
    return (
        server,
        level,
        len(answers),
        mean([answer.ttft_s for answer in answers]),
        mean(heard),
        percentile(heard, 0.95),
        mean(completions),
        percentile(completions, 0.5),
        percentile(completions, 0.95),
        mean([answer.real_time_factor for answer in answers]),
        throughput(loads),
        f"{min(rates):.3g} to {max(rates):.3g}",
        sum(answer.audio_s for answer in answers) / sum(load.wall_s for load in loads),
        f"{sum(answer.underruns for answer in answers)}",
        mean([answer.stalled_s for answer in answers]),
        f"{100 * mean([load.others_cpu for load in loads]):.0f}%",
    )


def _memory(result: RunResult) -> str:
    """The largest of all loads."""
    rows = []
    for server in _SERVERS:
        for level in levels_of(result, server):
            loads = loads_of(result, server, level)
            peaks = {name: max(load.peak_memory[name] for load in loads) for name in loads[0].peak_memory}
            told = ", ".join(f"{name} {peak / 2**20:,.0f}" for name, peak in peaks.items())
            rows.append((server, level, told, f"{sum(peaks.values()) / 2**20:,.0f}"))
    return _table(("server", "clients", "processes", "together"), rows)


def _parts(loads: list[Load]) -> str:
    requests = sum(len(load.answers) for load in loads)
    totals = {part: sum(load.parts.get(part, 0.0) for load in loads) for part in loads[0].parts}
    whole = sum(answer.completion_s for load in loads for answer in load.answers)
    rows = [(part, seconds / requests, f"{100 * seconds / whole:.0f}%") for part, seconds in totals.items()]
    return _table(("part", "seconds", "of the completion"), rows)


def stages(result: RunResult) -> str:
    """What the time of each stage's loop goes to, for each request."""
    rows = []
    for level in levels_of(result, "omnirelay"):
        loads = loads_of(result, "omnirelay", level)
        requests = sum(len(load.answers) for load in loads)
        for index, stage in enumerate(loads[0].stages):
            same = [load.stages[index] for load in loads]
            spent = [sum(each.seconds[activity] for each in same) / requests for activity in ACTIVITIES]
            steps = sum(each.steps for each in same)
            batch = sum(each.mean_batch * each.steps for each in same) / max(1, steps)
            rows.append((level, stage.name, *spent, steps / requests, batch))
    return _table(("clients", "stage", *ACTIVITIES, "steps", "mean batch"), rows)


def _edges(result: RunResult) -> str:
    load = loads_of(result, "omnirelay", levels_of(result, "omnirelay")[-1])[-1]
    requests = len(load.answers)
    rows = [
        (
            f"{edge.sender} → {edge.receiver}",
            edge.messages / requests,
            f"{edge.bytes / requests:,.0f}",
            edge.encode_us,
            edge.wait_us,
            edge.decode_us,
        )
        for edge in load.edges
    ]
    return _table(
        ("edge", "messages a request", "bytes a request", "encode µs", "wait µs", "decode µs"), rows
    )


def _hops(result: RunResult) -> str:
    rows = [
        (
            hop.message,
            f"{hop.bytes:,}",
            *(percentile(each, 0.5) for each in (hop.encode_ms, hop.wire_ms, hop.decode_ms, hop.total_ms)),
            percentile(hop.total_ms, 0.95),
        )
        for hop in result.hops
    ]
    return _table(("message", "bytes", "encode P50", "wire P50", "decode P50", "all P50", "all P95"), rows)


def _synthesis(result: RunResult) -> str:
    rows = [
        (
            f"{each.audio_s:g} s",
            mean(each.seconds),
            mean(each.seconds) / each.audio_s,
            f"{each.peak_memory / 2**20:,.0f}",
        )
        for each in result.synthesis
    ]
    return _table(("speech", "seconds", "a second of speech", "peak memory, MiB"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown; numbers are rounded and stand on the right."""
    told = [[_cell(value) for value in row] for row in rows]
    numbers = [all(row[column][:1].isdigit() for row in told) for column in range(len(head))]
    marks = ["---:" if number else "---" for number in numbers]
    lines = [list(head), marks, *told]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
