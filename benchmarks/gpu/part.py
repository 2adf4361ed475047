"""``python -m benchmarks.gpu.part NAME SETTINGS`` runs one part in this process, and writes JSON."""

import sys
from importlib import import_module
from typing import Final

import msgspec

from benchmarks.gpu.results import Settings
from shared.vllm.torchvision_compat import declare_missing_operators

PARTS: Final = ("bare", "parity", "steps", "load", "kill")
"""In the order in which they are run; each is a module of this package."""
WITHOUT_VLLM: Final = frozenset({"bare"})


if __name__ == "__main__":
    # Before anything imports transformers.
    declare_missing_operators()
    part = import_module(f"benchmarks.gpu.{PARTS[PARTS.index(sys.argv[1])]}")
    found = part.main(msgspec.json.decode(sys.argv[2], type=Settings))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
