"""What a part is given, and what it finds."""

from typing import Literal, TypeAlias

import msgspec

from benchmarks.measure.results import Table

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
