"""Arguments of ``omnirelay``, and what every subcommand shares: one clear line for every error."""

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from omnirelay.cli import chat, completion, status
from omnirelay.cli.output import fail
from omnirelay.cli.target import add_options
from omnirelay.errors import OmniRelayError

EXTENSIONS: Final = "omnirelay.commands"
"""Group of the entry points that add subcommands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: The arguments; none takes the process's.

    Returns:
        The exit status: 0, or 1 for an error that was reported.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    arguments = build_parser().parse_args(argv)
    try:
        status_code: int = arguments.run(arguments)
    except OmniRelayError as error:
        return fail(error)
    except BrokenPipeError:
        # Who reads our output has had enough; the rest must not complain at exit.
        sys.stdout = None
        return 1
    return status_code


def build_parser() -> argparse.ArgumentParser:
    """Give the parser of all subcommands: a client's, and those that other installed packages add.

    A package adds some by an entry point of the group :data:`EXTENSIONS`, a function that takes the
    subparsers.
    """
    parser = argparse.ArgumentParser(
        prog="omnirelay",
        description="Serve Qwen2.5-Omni: text, audio, images and video in, text and speech out.",
    )
    parser.add_argument("--version", action="version", version=f"omnirelay {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_chat(commands)
    _add_status(commands)
    for extension in sorted(metadata.entry_points(group=EXTENSIONS), key=lambda each: each.name):
        extension.load()(commands)
    _add_completion(commands, parser)
    return parser


def _version() -> str:
    try:
        return metadata.version("omnirelay")
    except metadata.PackageNotFoundError:
        return "(of a source tree that is not installed)"


Commands = argparse._SubParsersAction  # argparse has no public name for it


def _add_chat(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("chat", help="send one request and stream the answer, or converse")
    parser.add_argument(
        "text", nargs="?", metavar="TEXT", help="without it, and without a FILE: a conversation"
    )
    for kind, what in (("audio", "sound"), ("image", "picture"), ("video", "video")):
        parser.add_argument(
            f"--{kind}",
            action="append",
            default=[],
            metavar="FILE",
            help=f"a {what} that goes before the text, or its https: URL; may be given several times",
        )
    parser.add_argument("--use-audio-in-video", action="store_true", help="the videos' sound is heard too")
    parser.add_argument("--speaker", metavar="NAME", help="the voice; the checkpoint's default without it")
    parser.add_argument("--system", metavar="TEXT", help="system message; without it the gateway's")
    parser.add_argument("--text-only", action="store_true", help="no speech")
    parser.add_argument("--greedy", action="store_true", help="draw neither text nor speech at random")
    parser.add_argument("--seed", type=int, metavar="N", help="makes the answer repeatable")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most text tokens")
    parser.add_argument("--max-codec-tokens", type=int, metavar="N", help="most codec tokens, 50 a second")
    parser.add_argument("--out", type=Path, metavar="FILE.wav", help="where to write the speech")
    parser.add_argument(
        "--play",
        action=argparse.BooleanOptionalAction,
        help="play the speech; without a word, at a terminal if there is a player",
    )
    parser.add_argument("--history", type=Path, metavar="FILE", help="keep the lines of conversations there")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--verbose", action="store_true", help="which player; the figures of every answer")
    add_options(parser)
    parser.set_defaults(run=chat.run, refuse_usage=parser.error)


def _add_status(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("status", help="show the stages and the requests")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    add_options(parser)
    parser.set_defaults(run=status.run)


def _add_completion(commands: "Commands[argparse.ArgumentParser]", whole: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("completion", help="print a script for a shell's completion")
    parser.add_argument("shell", choices=completion.SHELLS)
    parser.set_defaults(run=completion.run, parser=whole)
