"""The arguments of ``omnirelay``, and how errors are reported."""

import argparse
import io
import os
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from omnirelay.cli import chat, completion, say, status
from omnirelay.cli.output import fail
from omnirelay.cli.target import add_options
from omnirelay.errors import OmniRelayError
from omnirelay.version import version

EXTENSIONS: Final = "omnirelay.commands"
"""Entry point group of subcommands."""


class _Parser(argparse.ArgumentParser):
    """Refuses an unknown option with the nearest one of its command; so do the parsers of subcommands."""

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        for each in unknown:
            nearest = get_close_matches(each.partition("=")[0], self._option_string_actions, 1)
            if each.startswith("--") and nearest:
                self.error(f"unrecognized arguments: {each}; did you mean {nearest[0]}?")
        return known, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        The exit status: 0, or 1 for an error that was reported.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        # What is not Unicode fails when it is sent, and a conversation goes on.
        sys.stdin.reconfigure(errors="surrogateescape")
    # One that was closed at the start is None: nobody reads it.
    sys.stdout, sys.stderr = (each or Path(os.devnull).open("w") for each in (sys.stdout, sys.stderr))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A terminal's encoding may lack what a model writes.
        sys.stdout.reconfigure(errors="replace")
    arguments = build_parser().parse_args(argv)
    try:
        try:
            status_code: int = arguments.run(arguments)
        except OmniRelayError as error:
            status_code = fail(error, as_json=getattr(arguments, "json", False))
    except BrokenPipeError:
        # The reader closed the pipe; nothing may fail on it at exit.
        sys.stdout = None
        return 1
    return status_code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands: the client's, and those of other installed packages.

    A package adds subcommands by an entry point of the group :data:`EXTENSIONS`, a function that takes the
    subparsers.
    """
    parser = _Parser(
        prog="omnirelay",
        description="Serve Qwen2.5-Omni: text, audio, images and video in, text and speech out.",
    )
    parser.add_argument("--version", action="version", version=f"omnirelay {version()}")
    commands: Commands[argparse.ArgumentParser] = parser.add_subparsers(
        required=True, metavar="COMMAND", parser_class=_Parser
    )
    _add_chat(commands)
    _add_say(commands)
    _add_status(commands)
    for extension in sorted(metadata.entry_points(group=EXTENSIONS), key=lambda each: each.name):
        extension.load()(commands)
    _add_completion(commands, parser)
    return parser


Commands = argparse._SubParsersAction  # argparse has no public name for it


def _add_chat(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat", help="send one request and stream the answer, or hold a conversation"
    )
    parser.add_argument("text", nargs="?", metavar="TEXT", help="without TEXT and FILE: a conversation")
    for kind in ("audio", "image", "video"):
        parser.add_argument(
            f"--{kind}",
            action="append",
            default=[],
            metavar="FILE",
            help=f"{kind} file or https: URL, sent before the text; may be repeated",
        )
    parser.add_argument(
        "--camera",
        metavar="SOURCE",
        help="send a picture of it with each message: /dev/video0, a file, a URL",
    )
    parser.add_argument("--use-audio-in-video", action="store_true", help="use the videos' sound too")
    parser.add_argument("--text-only", action="store_true", help="no speech")
    parser.add_argument("--greedy", action="store_true", help="greedy decoding of text and speech")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="limit on text tokens")
    parser.add_argument(
        "--max-codec-tokens", type=int, metavar="N", help="limit on codec frames (Qwen2.5-Omni: 50 a second)"
    )
    _add_speech(parser, "at a terminal, if a player is installed")
    parser.add_argument("--history", type=Path, metavar="FILE", help="keep the history of input lines here")
    parser.add_argument(
        "--verbose", action="store_true", help="print the player, and the timing of every answer"
    )
    add_options(parser)
    parser.set_defaults(run=chat.run, refuse_usage=parser.error)


def _add_say(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("say", help="read a text aloud, word for word")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="without it: standard input, while it comes")
    _add_speech(parser, "unless it is written")
    add_options(parser)
    parser.set_defaults(run=say.run, refuse_usage=parser.error)


def _add_speech(parser: argparse.ArgumentParser, played: str) -> None:
    """Add the options of speech; ``played`` says when it is played by default."""
    parser.add_argument("--voice", "--speaker", metavar="NAME", help="voice (default: the checkpoint's)")
    parser.add_argument("--system", metavar="TEXT", help="system message (default: the gateway's)")
    parser.add_argument("--seed", type=int, metavar="N", help="make the answer repeatable")
    parser.add_argument("--out", type=Path, metavar="FILE.wav", help="write the speech to this file")
    parser.add_argument(
        "--play", action=argparse.BooleanOptionalAction, help=f"play the speech (default: {played})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def _add_status(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("status", help="show stages and requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser)
    parser.set_defaults(run=status.run)


def _add_completion(commands: "Commands[argparse.ArgumentParser]", whole: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("completion", help="print a shell's completion script")
    parser.add_argument("shell", choices=completion.SHELLS)
    parser.set_defaults(run=completion.run, parser=whole)
