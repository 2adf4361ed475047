"""Draws the dashboard without Grafana: its panels where they stand, with what Prometheus answered."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from numpy.typing import NDArray
from PIL import Image

COLUMNS: Final = 24
COLUMN: Final = 50
ROW: Final = 31
"""A cell of the dashboard's grid, in hundredths of an inch, as all lengths below."""
GAP: Final = 4
DPI: Final = 140
INK: Final = "#24292f"
FAINT: Final = "#6b737c"
GROUND: Final = "#eceff2"
COLOURS: Final = (
    "#4f9d45", "#e0a30c", "#3a7bd5", "#e8702a", "#d93a4c",
    "#9657c9", "#2aa198", "#8c6d46", "#d76fb1", "#7d8590",
)  # fmt: skip
NAMED: Final = {
    "green": "#4f9d45", "yellow": "#e0a30c", "orange": "#e8702a",
    "red": "#d93a4c", "blue": "#3a7bd5", "purple": "#9657c9",
}  # fmt: skip
RATES: Final = {"reqps": "requests/s", "ops": "per second"}
SCALES: Final[dict[str, tuple[tuple[float, str], ...]]] = {
    "s": ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s")),
    "bytes": ((1.0, "B"), (2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB")),
    "Bps": ((1.0, "B/s"), (1e3, "kB/s"), (1e6, "MB/s")),
    "percentunit": ((0.01, "%"),),
}


Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One line of a panel.

    Attributes:
        legend: Its name.
        times: Seconds since the picture's beginning.
        values: As many, in the panel's unit, not a number where there is none.
    """

    legend: str
    times: list[float]
    values: list[float]

    def known(self) -> tuple[Numbers, Numbers]:
        """Times and values where there is one."""
        times, values = np.array(self.times), np.array(self.values)
        return times[~np.isnan(values)], values[~np.isnan(values)]


def name_of(legend: str, labels: dict[str, str]) -> str:
    """A legend with the labels of a series in it."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)


def draw(panels: Sequence[dict[str, Any]], data: dict[int, list[Series]], seconds: float, path: Path) -> None:
    """Write a picture.

    Args:
        panels: Rows and panels of the dashboard.
        data: The series of each panel, by its id.
        seconds: Length of the time axis.
        path: A PNG file.
    """
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width, height = COLUMNS * COLUMN + 2 * GAP, rows * ROW + 2 * GAP
    figure = Figure((width / 100, height / 100), dpi=DPI, facecolor=GROUND)
    canvas = FigureCanvasAgg(figure)
    for panel in panels:
        place = panel["gridPos"]
        left, top = GAP + place["x"] * COLUMN, GAP + place["y"] * ROW
        box = _Box(figure, left, top, place["w"] * COLUMN, place["h"] * ROW, width, height)
        if panel["type"] == "row":
            box.write(panel["title"], GAP, ROW / 2, size=10.5, weight="bold", va="center")
        elif panel["type"] == "stat":
            _draw_stat(box, panel, data[panel["id"]], seconds)
        else:
            _draw_lines(box, panel, data[panel["id"]], seconds)
    canvas.draw()
    # A picture of lines and letters needs no more colours, and half of the bytes.
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(path, optimize=True)


@dataclass(frozen=True)
class _Box:
    """A rectangle of the picture; lengths count from its upper left corner."""

    figure: Figure
    left: float
    top: float
    width: float
    height: float
    page_width: float
    page_height: float

    def fill(self) -> None:
        place = self.place(GAP / 2, GAP / 2, self.width - GAP, self.height - GAP)
        frame = Rectangle(
            place[:2], *place[2:], facecolor="white", edgecolor="#d0d7de", linewidth=0.6, zorder=-1
        )
        self.figure.add_artist(frame)

    def write(self, text: str, x: float, y: float, **options: Any) -> None:
        place = self.place(x, y)
        self.figure.text(place[0], place[1], text, **{"color": INK, "va": "top", **options})

    def axes(self, left: float, top: float, right: float, bottom: float) -> Axes:
        """Axes with margins."""
        inner = self.place(left, top, self.width - left - right, self.height - top - bottom)
        return self.figure.add_axes(inner, facecolor="none")

    def place(
        self, x: float, y: float, width: float = 0.0, height: float = 0.0
    ) -> tuple[float, float, float, float]:
        """A part of it as matplotlib counts: in shares of the picture, from its lower left corner."""
        return (
            (self.left + x) / self.page_width,
            1 - (self.top + y + height) / self.page_height,
            width / self.page_width,
            height / self.page_height,
        )


def _scale(unit: str, top: float) -> tuple[float, str]:
    """By what values are divided, and what then stands behind them."""
    scales = SCALES.get(unit)
    if scales is None:
        return 1.0, ""
    return next((scale for scale in reversed(scales) if top >= scale[0]), scales[0])


def _number(value: float) -> str:
    """Three digits."""
    if value >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _draw_stat(box: _Box, panel: dict[str, Any], series: list[Series], seconds: float) -> None:
    settings = panel["fieldConfig"]["defaults"]
    (line,) = series
    times, values = line.known()
    last = float(values[-1]) if values.size else 0.0
    divisor, suffix = _scale(settings["unit"], last)
    steps = settings["thresholds"]["steps"]
    colour = NAMED[[step["color"] for step in steps if step["value"] is None or last >= step["value"]][-1]]
    box.fill()
    box.write(panel["title"], 10, 9, size=9, weight="bold")
    text = f"{_number(last / divisor)} {suffix}".strip()
    box.write(text, box.width / 2, box.height * 0.47, size=20, ha="center", va="center", color=colour)
    axes = box.axes(3, box.height * 0.68, 3, 3)
    axes.fill_between(times, values, color=colour, alpha=0.18, linewidth=0)
    axes.plot(times, values, color=colour, linewidth=0.9)
    axes.set_xlim(0, seconds)
    axes.set_ylim(0, 1.1 * float(values.max(initial=0.0)) or 1.0)
    axes.set_axis_off()


def _draw_lines(box: _Box, panel: dict[str, Any], series: list[Series], seconds: float) -> None:
    settings = panel["fieldConfig"]["defaults"]
    unit, custom = settings["unit"], settings["custom"]
    box.fill()
    box.write(panel["title"], 10, 9, size=9, weight="bold")
    behind = RATES.get(unit, unit.partition("suffix:")[2])
    box.write(behind, box.width - 10, 10, size=7.4, ha="right", color=FAINT)
    axes = box.axes(58, 30, 12, 46)
    colours = _colours(panel, [each.legend for each in series])
    top = (_plot_stacked if "stacking" in custom else _plot)(axes, series, colours)
    _set_scales(axes, unit, top, seconds)
    _add_legend(box, axes, colours)


def _colours(panel: dict[str, Any], names: list[str]) -> dict[str, str]:
    """The colour of each series: the panel's own for it, or the next one."""
    chosen = {
        each["matcher"]["options"]: NAMED[each["properties"][0]["value"]["fixedColor"]]
        for each in panel["fieldConfig"]["overrides"]
    }
    return {name: chosen.get(name, COLOURS[number % len(COLOURS)]) for number, name in enumerate(names)}


def _plot(axes: Axes, series: list[Series], colours: dict[str, str]) -> float:
    top = 0.0
    for each in series:
        times, values = each.known()
        axes.plot(times, values, color=colours[each.legend], linewidth=1.1)
        if len(series) == 1:
            axes.fill_between(times, values, color=colours[each.legend], alpha=0.1, linewidth=0)
        top = max(top, float(values.max(initial=0.0)))
    return top


def _plot_stacked(axes: Axes, series: list[Series], colours: dict[str, str]) -> float:
    grid = np.unique(np.concatenate([each.times for each in series]))
    base = np.zeros(grid.size)
    for each in series:
        times, known = each.known()
        if not known.any():
            continue
        values, colour = np.interp(grid, times, known, left=0.0, right=0.0), colours[each.legend]
        axes.fill_between(grid, base, base + values, color=colour, alpha=0.35, linewidth=0)
        axes.plot(grid, base + values, color=colour, linewidth=1.0)
        base = base + values
    return float(base.max(initial=0.0))


def _set_scales(axes: Axes, unit: str, top: float, seconds: float) -> None:
    divisor, suffix = _scale(unit, top)
    locator = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])
    axes.set_yticks(np.array(locator.tick_values(0, top / divisor) if top > 0 else (0, 1)) * divisor)
    axes.set_ylim(0, 1.06 * top or divisor)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{_number(value / divisor)} {suffix}"))
    axes.set_xlim(0, seconds)
    axes.xaxis.set_major_locator(MultipleLocator(max(1, math.ceil(seconds / 150)) * 30))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{int(at) // 60}:{int(at) % 60:02}"))
    axes.tick_params(length=0, labelsize=7.4, labelcolor=FAINT, pad=4)
    axes.grid(color="#e4e8ec", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _add_legend(box: _Box, axes: Axes, colours: dict[str, str]) -> None:
    """Below the axes, in as many columns as fit; many lines take their room from the axes."""
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    corner = box.place(10, box.height - 5)[:2]
    for columns in range(min(len(handles), 5), 0, -1):
        legend = axes.legend(
            handles, list(colours), ncols=columns, fontsize=7.6, labelcolor=INK, frameon=False,
            loc="lower left", borderaxespad=0, bbox_to_anchor=corner, bbox_transform=box.figure.transFigure,
            handlelength=0.9, handleheight=0.35, handletextpad=0.5, columnspacing=1.2, labelspacing=0.35,
        )  # fmt: skip
        extent = legend.get_window_extent()
        if extent.width * 100 / DPI <= box.width - 20:
            break
    grown = (extent.height * 100 / DPI - 20) / box.page_height
    if grown > 0:
        place = axes.get_position()
        axes.set_position((place.x0, place.y0 + grown, place.width, place.height - grown))
