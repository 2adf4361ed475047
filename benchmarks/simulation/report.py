"""The tables and the picture of a run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.simulation.check import Check, Pair
from benchmarks.simulation.plan import ANSWER_S, PAUSE_S, TTFA_S, Plan, scaled
from benchmarks.simulation.stack import Replicas
from benchmarks.simulation.step_times import StepTime, StepTimes
from shared.messages import MAX_REPLICAS, STAGES

BEYOND = (1_000, 10_000, 100_000, 1_000_000)
"""Speakers for which the largest plan is repeated."""


def table_of_times(times: Mapping[str, StepTimes]) -> str:
    """The fitted step times."""
    rows = [
        f"| `{size}` | " + " | ".join(_time(getattr(each, stage)) for stage in STAGES) + " |"
        for size, each in times.items()
    ]
    return "\n".join(["| ms of a step | thinker | talker | token2wav |", "|---|---|---|---|", *rows])


def table_of_checks(checks: Mapping[str, Sequence[Check]]) -> str:
    """Measured and simulated figures."""
    rows = [_row(size, each) for size, found in checks.items() for each in found]
    head = (
        "| measured; simulated | clients | first text, s | first audio, s | completion, s | requests/s "
        "| silence an answer, s |"
    )
    return "\n".join([head, "|---|--:|--:|--:|--:|--:|--:|", *rows, "", _errors(checks)])


def table_of_plans(plans: Sequence[Plan], streams_of_a_gateway: int | None) -> str:
    """Replicas by speakers, simulated and scaled up from the largest plan."""
    rows = []
    for each in plans:
        replicas = each.replicas
        told = f"{replicas.thinker} | {replicas.talker} | {replicas.token2wav}" if replicas else "none | | "
        rows.append(
            f"| {each.speakers:,} | {told} | {_seconds(each.ttfa_p95_s)} | {_share(each)} "
            f"| {_gateways(each.speakers, replicas, streams_of_a_gateway)} |"
        )
    for count in BEYOND:
        more = scaled(plans, count)
        if more is not None and count > plans[-1].speakers:
            rows.append(
                f"| {count:,} | {more.thinker:,} | {more.talker:,} | {more.token2wav:,} | | "
                f"| {_gateways(count, more, streams_of_a_gateway)} |"
            )
    return "\n".join(
        [
            "| speakers | thinkers | talkers | token2wav | first audio, P95 | with silence | gateways |",
            "|--:|--:|--:|--:|--:|--:|--:|",
            *rows,
        ]
    )


def draw(plans: Mapping[str, Sequence[Plan]], path: Path) -> None:
    """Draw replicas by speakers, on logarithmic axes."""
    figure, axis = plt.subplots(figsize=(7, 4))
    for (name, found), style in zip(plans.items(), ("-o", "--s", ":^"), strict=False):
        enough = [(each.speakers, each.replicas) for each in found if each.replicas is not None]
        for stage, colour in zip(STAGES, ("tab:blue", "tab:orange", "tab:green"), strict=True):
            numbers = [getattr(replicas, stage) for _, replicas in enough]
            axis.plot([count for count, _ in enough], numbers, style, color=colour, label=f"{stage}, {name}")
    if any(each.replicas for found in plans.values() for each in found):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.legend(fontsize=8)
    axis.set_xlabel("speakers")
    axis.set_ylabel("replicas")
    axis.set_title(
        f"Enough for first audio in {TTFA_S:g} s (P95) and no silence; "
        f"answers of {ANSWER_S:g} s, pauses of {PAUSE_S:g} s",
        fontsize=9,
    )
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _row(size: str, each: Check) -> str:
    figures = (each.ttft_s, each.ttfa_s, each.completion_s, each.requests_per_s)
    silence = f"{each.silent_s.measured:.1f}; {each.silent_s.simulated:.1f}"
    return f"| `{size}` | {each.clients} | {' | '.join(map(_pair, figures))} | {silence} |"


def _seconds(value: float) -> str:
    return "no answer" if math.isnan(value) else f"{value:.2f} s"


def _share(plan: Plan) -> str:
    return "" if math.isnan(plan.ttfa_p95_s) else f"{plan.silent:.0%}"


def _time(time: StepTime) -> str:
    return f"{1000 * time.step_s:.1f} + {1000 * time.unit_s:.2f} n"


def _pair(pair: Pair) -> str:
    return f"{pair.measured:.3g}; {pair.simulated:.3g} ({pair.error:+.0%})"


def _errors(checks: Mapping[str, Sequence[Check]]) -> str:
    """The relative errors over all loads, in words."""
    told = []
    for name, words in (
        ("ttfa_s", "time to first audio"),
        ("completion_s", "completion"),
        ("requests_per_s", "requests/s"),
    ):
        errors = [abs(getattr(each, name).error) for found in checks.values() for each in found]
        told.append(f"{words} {median(errors):.0%}, at most {max(errors):.0%}")
    return f"Median errors over these loads: {'; '.join(told)}."


def _gateways(speakers: int, replicas: Replicas | None, streams: int | None) -> str:
    """How many for so many streams, and for so many replicas of a stage."""
    if streams is None or replicas is None:
        return ""
    most = max(replicas.thinker, replicas.talker, replicas.token2wav)
    return f"{max(math.ceil(speakers / streams), math.ceil(most / MAX_REPLICAS)):,}"
