"""A run in pictures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.measure.load import Load
from benchmarks.measure.results import RunResult, mean
from benchmarks.report.figures import levels_of, loads_of, throughput

COLOURS = {"model": "#1f77b4", "engine": "#ff7f0e", "take": "#9467bd", "send": "#2ca02c", "wait": "#d9d9d9"}
MEANING = {
    "model": "model (forward passes)",
    "engine": "engine (schedule, prepare, sample)",
    "take": "take messages (decode, check)",
    "send": "send (encode, hand over)",
    "wait": "wait",
}


def draw(result: RunResult, directory: Path, name: str) -> list[Path]:
    """Draw what the run allows; gives the files."""
    pictures: list[tuple[str, Callable[[RunResult, Any], None]]] = []
    if loads_of(result, "omnirelay"):
        pictures += [("requests", _requests), ("latency", _latency)]
    if result.synthesis:
        pictures.append(("token2wav", _synthesis))
    files = [_save(result, directory / f"{name}-{kind}.png", picture) for kind, picture in pictures]
    if loads_of(result, "omnirelay"):
        files.append(profile(result, directory / f"{name}-profile.png"))
    return files


def profile(result: RunResult, path: Path) -> Path:
    """Where a request's time goes, per stage, at each number of clients."""
    levels = levels_of(result, "omnirelay")
    figure, axes = plt.subplots(len(levels), 1, figsize=(9, 1 + 1.7 * len(levels)), squeeze=False)
    for level, axis in zip(levels, axes[:, 0], strict=True):
        _bars(axis, loads_of(result, "omnirelay", level))
        axis.set_title(f"{level} client{'s' if level > 1 else ''}", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("seconds of the stage's loop for each request")
    handles, _ = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, MEANING.values(), loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(_title(result), fontsize=9)
    figure.tight_layout(rect=(0, 0.1 if len(levels) < 3 else 0.06, 1, 1))
    return _write(figure, path)


def _bars(axis: Any, loads: list[Load]) -> None:
    """One bar for each stage, made of its activities."""
    requests = sum(len(load.answers) for load in loads)
    names = [stage.name for stage in loads[0].stages]
    left = [0.0] * len(names)
    for activity in MEANING:
        widths = [
            sum(load.stages[index].seconds[activity] for load in loads) / requests
            for index in range(len(names))
        ]
        axis.barh(names, widths, left=left, color=COLOURS[activity], label=activity)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()


def _requests(result: RunResult, axis: Any) -> None:
    levels = levels_of(result, "omnirelay")
    rates = [throughput(loads_of(result, "omnirelay", level)) for level in levels]
    axis.bar([str(level) for level in levels], rates, color=COLOURS["model"], label="OmniRelay")
    if reference := loads_of(result, "transformers", 1):
        axis.axhline(throughput(reference), color="black", linestyle="--", label="transformers, in turn")
    axis.set_xlabel("clients")
    axis.set_ylabel("requests/s")
    axis.legend(frameon=False)


def _latency(result: RunResult, axis: Any) -> None:
    levels = levels_of(result, "omnirelay")
    by_level = [
        [answer for load in loads_of(result, "omnirelay", level) for answer in load.answers]
        for level in levels
    ]
    axis.plot(levels, [mean([a.completion_s for a in each]) for each in by_level], "o-", label="completion")
    axis.plot(levels, [mean([a.ttfa_s for a in each]) for each in by_level], "o-", label="first audio")
    axis.plot(levels, [mean([a.ttft_s for a in each]) for each in by_level], "o-", label="first text")
    if reference := loads_of(result, "transformers", 1):
        whole = mean([answer.completion_s for load in reference for answer in load.answers])
        axis.axhline(whole, color="black", linestyle="--", label="transformers, 1 client")
    axis.set_xticks(levels)
    axis.set_yscale("log")
    axis.set_xlabel("clients")
    axis.set_ylabel("seconds, mean")
    axis.legend(frameon=False)


def _synthesis(result: RunResult, axis: Any) -> None:
    lengths = [each.audio_s for each in result.synthesis]
    axis.plot(lengths, [mean(each.seconds) / each.audio_s for each in result.synthesis], "o-")
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds of speech")
    axis.set_ylabel("token2wav's seconds for each")


def _save(result: RunResult, path: Path, picture: Callable[[RunResult, Any], None]) -> Path:
    figure, axis = plt.subplots(figsize=(6, 4))
    picture(result, axis)
    figure.suptitle(_title(result), fontsize=8)
    figure.tight_layout()
    return _write(figure, path)


def _write(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _title(result: RunResult) -> str:
    machine = result.machine
    seconds = result.loads[-1].workload.seconds if result.loads else 0.0
    return f"checkpoint {result.checkpoint}, answers of {seconds:g} s; {machine.cpu}, {machine.cores} cores"
