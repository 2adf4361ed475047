"""What a part is given, and what it finds; what ``nvidia-smi`` says meanwhile."""

import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from typing import Final, Literal, Self, TypeAlias

import msgspec

from benchmarks.measure.results import Cell, Table, mean

Device: TypeAlias = Literal["cuda", "cpu"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all parts are given.

    Attributes:
        device: Where the model computes; ``cpu`` is for trying the parts themselves.
        checkpoint: Size of the random checkpoint.
        model: Its directory.
        clients: Clients at once, one load each.
        seconds: Speech of an answer.
    """

    device: Device
    checkpoint: str
    model: str
    clients: list[int]
    seconds: float


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a part found: tables, and what is wrong; a part without problems has passed."""

    tables: list[Table]
    problems: list[str] = []


class FinishedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part that ran to its end, as it is kept; with other settings it is run again.

    ``gpu`` is what nvidia-smi said meanwhile; empty without it.
    """

    name: str
    settings: Settings
    result: PartResult
    wall_s: float
    gpu: list[Table] = []


FIELDS: Final = ("index", "utilization.gpu", "memory.used", "power.draw")


class Sampler:
    """Samples all GPUs as long as the block lasts; without ``nvidia-smi`` there is nothing to sample."""

    def __init__(self, command: str = "nvidia-smi") -> None:
        self._path = shutil.which(command)
        self._closing = ExitStack()
        self._lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Begin."""
        if self._path is not None:
            self._file = self._closing.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
            query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "--loop=1"]
            self.process = subprocess.Popen(  # noqa: S603  The driver's own program.
                [self._path, *query], stdout=self._file, stderr=subprocess.DEVNULL, text=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._file.seek(0)
            self._lines = self._file.read().splitlines()
        self._closing.close()

    def tables(self) -> list[Table]:
        """Mean and most of each figure, by GPU."""
        found: dict[str, list[list[float]]] = {}
        for line in self._lines:
            index, *values = (value.strip() for value in line.split(","))
            # "[N/A]": the device has no such sensor; the last line may have been cut.
            if len(values) == len(FIELDS) - 1 and all(value.replace(".", "").isdigit() for value in values):
                found.setdefault(index, []).append([float(value) for value in values])
        rows: list[list[Cell]] = []
        for index, samples in found.items():
            columns = [list(column) for column in zip(*samples, strict=True)]
            rows.append([index, len(samples), *(each(column) for column in columns for each in (mean, max))])
        names = ("busy %", "memory MiB", "power W")
        heads = [f"{name}, {kind}" for name in names for kind in ("mean", "most")]
        title = "nvidia-smi, every second"
        return [Table(title=title, columns=["GPU", "samples", *heads], rows=rows)] if rows else []
