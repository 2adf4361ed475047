"""``nvidia-smi``, asked every second while a part runs."""

import shutil
import subprocess
import threading
from types import TracebackType
from typing import Final, Self

from benchmarks.gpu.results import Table

FIELDS: Final = ("index", "utilization.gpu", "memory.used", "power.draw")
COMMAND: Final = "nvidia-smi"


class Sampler:
    """Samples all GPUs as long as the block lasts; without ``nvidia-smi`` there is nothing to sample."""

    def __init__(self, command: str = COMMAND) -> None:
        self._lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._path = shutil.which(command)

    def __enter__(self) -> Self:
        """Begin."""
        if self._path is not None:
            query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "--loop=1"]
            self._process = subprocess.Popen(  # noqa: S603  The driver's own program.
                [self._path, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def tables(self) -> list[Table]:
        """Mean and most of each figure, by GPU."""
        found: dict[str, list[list[float]]] = {}
        for line in self._lines:
            index, *values = (value.strip() for value in line.split(","))
            try:
                found.setdefault(index, []).append([float(value) for value in values])
            except ValueError:
                # "[N/A]": the device has no such sensor, or the line was cut when sampling ended.
                continue
        rows: list[list[str | float | int | None]] = []
        for index, samples in found.items():
            whole = [sample for sample in samples if len(sample) == len(FIELDS) - 1]
            if whole:
                columns = list(zip(*whole, strict=True))
                figures = [
                    figure for column in columns for figure in (sum(column) / len(column), max(column))
                ]
                rows.append([index, len(whole), *figures])
        if not rows:
            return []
        heads = [
            f"{name}, {kind}" for name in ("busy %", "memory MiB", "power W") for kind in ("mean", "most")
        ]
        return [Table(title="nvidia-smi, every second", columns=["GPU", "samples", *heads], rows=rows)]

    def _read(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._lines.extend(self._process.stdout)
