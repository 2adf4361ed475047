"""A run as a picture: where a request's time goes."""

from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.measure.results import RunResult
from benchmarks.report import levels_of, loads_of

ACTIVITIES: Final = {
    "model": ("#1f77b4", "model (forward passes)"),
    "engine": ("#ff7f0e", "engine (schedule, prepare, sample)"),
    "take": ("#9467bd", "take messages (decode, check)"),
    "send": ("#2ca02c", "send (encode, hand over)"),
    "wait": ("#d9d9d9", "wait"),
}


def draw(result: RunResult, directory: Path, name: str) -> None:
    """Draw the loads on OmniRelay, if there are any."""
    levels = levels_of(result, "omnirelay")
    if not levels:
        return
    machine = result.machine
    title = (
        f"checkpoint {result.checkpoint}, answers of {result.loads[-1].workload.seconds:g} s; "
        f"{machine.cpu}, {machine.cores} cores"
    )
    figure, axes = plt.subplots(len(levels), 1, figsize=(9, 1 + 1.7 * len(levels)), squeeze=False)
    for level, axis in zip(levels, axes[:, 0], strict=True):
        _profile(result, level, axis)
    axes[-1, 0].set_xlabel("seconds of the stage's loop for each request")
    axes[-1, 0].legend(ncols=3, fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.4))
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(directory / f"{name}-profile.png", dpi=110)
    plt.close(figure)


def _profile(result: RunResult, level: int, axis: Any) -> None:
    """One bar for each stage, made of its activities."""
    loads = loads_of(result, "omnirelay", level)
    requests = sum(len(load.answers) for load in loads)
    stages = list(zip(*(load.stages for load in loads), strict=True))
    names, left = [same[0].name for same in stages], [0.0] * len(stages)
    for activity, (colour, meaning) in ACTIVITIES.items():
        widths = [sum(each.seconds[activity] for each in same) / requests for same in stages]
        axis.barh(names, widths, left=left, color=colour, label=meaning)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_title(f"{level} client{'s' * (level > 1)}", loc="left", fontsize=10)
