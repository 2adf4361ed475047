"""``omnirelay completion``: a completion script for a shell."""

import argparse
from collections.abc import Iterator
from typing import Final

from omnirelay.cli.output import say
from omnirelay.errors import MissingPackageError

SHELLS: Final = ("bash", "zsh", "fish")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        MissingPackageError: shtab is not installed.
    """
    try:
        import shtab  # noqa: PLC0415 - no other command needs it
    except ModuleNotFoundError as error:
        raise MissingPackageError("shtab", "completion") from error

    parser: argparse.ArgumentParser = arguments.parser
    for action in _actions(parser):
        metavar = str(action.metavar)
        if metavar.startswith(("FILE", "DIR")):
            # What shtab looks for; argparse knows nothing of it.
            action.complete = shtab.DIRECTORY if metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    say(shtab.complete(parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument and option of a parser and its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
