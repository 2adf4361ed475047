"""What a part is told, and what it gives."""

from typing import Literal, TypeAlias

import msgspec

Cell: TypeAlias = str | float | int | None
Device: TypeAlias = Literal["cuda", "cpu"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all parts are told.

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


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Figures: a row has as many cells as there are columns."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a part found.

    Attributes:
        tables: Its figures.
        problems: What is wrong, in words; a part without any has passed.
    """

    tables: list[Table]
    problems: list[str] = []


class FinishedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part that ran to its end, as it is kept.

    Attributes:
        name: Which.
        settings: What it was told; with others it is run again.
        result: What it found.
        wall_s: How long it took.
        gpu: What nvidia-smi said meanwhile; empty without it.
    """

    name: str
    settings: Settings
    result: PartResult
    wall_s: float
    gpu: list[Table] = []
