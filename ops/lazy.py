"""Commands that are loaded when they run: what the others need takes half a second to load."""

import argparse
from collections.abc import Callable
from importlib import import_module


def loaded(module: str, function: str = "run") -> Callable[[argparse.Namespace], int]:
    """A function of a module, which is imported at its first call."""

    def run(arguments: argparse.Namespace) -> int:
        status: int = getattr(import_module(module), function)(arguments)
        return status

    return run
