"""``python -m benchmarks.gpu.part NAME SETTINGS`` runs one part in this process, and writes JSON."""

import sys
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from benchmarks.gpu.results import PartResult, Settings
from shared.vllm.torchvision_compat import declare_missing_operators


def _bare(settings: Settings) -> PartResult:
    from benchmarks.gpu.bare import main  # noqa: PLC0415 - each part loads only what it needs

    return main(settings)


def _parity(settings: Settings) -> PartResult:
    from benchmarks.gpu.parity import main  # noqa: PLC0415 - as above

    return main(settings)


def _steps(settings: Settings) -> PartResult:
    from benchmarks.gpu.steps import main  # noqa: PLC0415 - as above

    return main(settings)


def _load(settings: Settings) -> PartResult:
    from benchmarks.gpu.load import main  # noqa: PLC0415 - as above

    return main(settings)


def _kill(settings: Settings) -> PartResult:
    from benchmarks.gpu.kill import main  # noqa: PLC0415 - as above

    return main(settings)


PARTS: Final[Mapping[str, Callable[[Settings], PartResult]]] = {
    "bare": _bare,
    "parity": _parity,
    "steps": _steps,
    "load": _load,
    "kill": _kill,
}
"""In the order in which they are run."""
WITHOUT_VLLM: Final = frozenset({"bare"})


if __name__ == "__main__":
    # Before anything imports transformers.
    declare_missing_operators()
    found = PARTS[sys.argv[1]](msgspec.json.decode(sys.argv[2], type=Settings))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
