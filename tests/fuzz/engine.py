"""The process that fuzzes: ``python -m tests.fuzz.engine TARGET`` and libFuzzer's own arguments."""

import gc
import logging
import sys
from typing import Final

import atheris

from tests.fuzz.table import TARGETS, bounded

COVERED: Final = ["shared", "gateway", "services", "h11", "websockets.frames", "websockets.server", "yaml"]
"""Packages whose branches guide the fuzzer: ours, and the parsers in Python that stand before them."""


def main() -> None:
    """Fuzz until libFuzzer has done what it was told."""
    # As in production nobody reads them; writing them would take most of the time.
    logging.disable(logging.CRITICAL)
    target = TARGETS[sys.argv[1]]
    with atheris.instrument_imports(include=COVERED):
        check, _ = target.load()
    # What the modules are made of is never garbage, and looking through it takes time.
    gc.freeze()
    # libFuzzer starts itself again when it merges, by this name.
    itself = f"{sys.executable} -m tests.fuzz.engine {target.name}"
    atheris.Setup([itself, *sys.argv[2:]], lambda data: bounded(check, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
