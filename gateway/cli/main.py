"""Arguments of ``omnirelay``, and what every subcommand shares: one clear line for every error."""

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from gateway.cli import api_key, batch, chat, checkpoint, completion, demo, doctor, keys, status, up
from gateway.cli.output import fail
from gateway.cli.target import add_options
from shared.errors import OmniRelayError

INTERRUPTED: Final = 130
"""Exit status of a program that Ctrl-C ended, as shells expect it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: The arguments; none takes the process's.

    Returns:
        The exit status: 0, 1 for an error that was told, 130 after Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        status_code: int = arguments.run(arguments)
    except OmniRelayError as error:
        return fail(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who reads our output has had enough; the rest must not complain at exit.
        sys.stdout = None
        return 1
    return status_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omnirelay",
        description="Serve Qwen2.5-Omni: text, sound, pictures and video in, text and speech out.",
    )
    parser.add_argument("--version", action="version", version=f"omnirelay {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_checkpoint(commands)
    _add_up(commands)
    _add_chat(commands)
    _add_batch(commands)
    _add_status(commands)
    _add_demo(commands)
    _add_doctor(commands)
    _add_keys(commands)
    _add_api_key(commands)
    _add_completion(commands, parser)
    return parser


def _version() -> str:
    try:
        return metadata.version("omnirelay")
    except metadata.PackageNotFoundError:
        return "(of a source tree that is not installed)"


_Commands = argparse._SubParsersAction  # argparse has no public name for it


def _add_checkpoint(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("checkpoint", help="make a random checkpoint")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--size", choices=("tiny", "small", "bench"), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=checkpoint.run)


def _add_up(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("up", help="run the four processes on this machine until Ctrl-C")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML; the defaults without it")
    parser.add_argument("--text-only", action="store_true", help="no speech: without talker and token2wav")
    parser.set_defaults(run=up.run)


def _add_chat(commands: "_Commands[argparse.ArgumentParser]") -> None:
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


def _add_batch(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("batch", help="answer a file of prompts, and resume where it stopped")
    parser.add_argument("prompts", type=Path, metavar="FILE.jsonl", help="one prompt a line, as JSON")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results are written")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML of the stack; the defaults without")
    parser.add_argument("--text-only", action="store_true", help="no speech")
    parser.add_argument("--concurrency", type=_positive, metavar="N", help="requests at once")
    add_options(parser)
    parser.set_defaults(run=batch.run, refuse_usage=parser.error, gateway=None)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _add_status(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("status", help="show the stages and the requests")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    add_options(parser)
    parser.set_defaults(run=status.run)


def _add_demo(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("demo", help="start the stack, send one request, stop the stack")
    parser.add_argument("--out", type=Path, metavar="FILE.wav", help=f"default: {demo.OUT}")
    parser.add_argument("--verbose", action="store_true", help="show the output of the processes too")
    parser.set_defaults(run=demo.run)


def _add_doctor(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("doctor", help="say what is wrong with this set-up, and what to do")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML; the defaults without it")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=doctor.run)


def _add_keys(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("keys", help="make keys for the sockets between the processes")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--force", action="store_true", help="replace the keys that are there")
    parser.set_defaults(run=keys.run)


def _add_api_key(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("api-key", help="make a key for a client of the gateway, and print it")
    parser.add_argument("name", metavar="NAME", help="what the key goes by in logs and metrics")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML; its gateway.api_keys is added to")
    parser.add_argument("--file", type=Path, metavar="FILE", help="add to this file instead")
    parser.add_argument("--requests-per-second", type=float, metavar="N", help="that the key may begin")
    parser.add_argument("--burst", type=int, metavar="N", help="requests at once, after a pause")
    parser.add_argument("--max-requests", type=int, metavar="N", help="that may be open at once")
    parser.add_argument("--request-bytes", type=int, metavar="N", help="largest request, media included")
    parser.add_argument(
        "--best-priority", type=int, metavar="N", help="most urgent one; smaller is more urgent"
    )
    parser.set_defaults(run=api_key.run)


def _add_completion(commands: "_Commands[argparse.ArgumentParser]", whole: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("completion", help="print a script for a shell's completion")
    parser.add_argument("shell", choices=completion.SHELLS)
    parser.set_defaults(run=completion.run, parser=whole)
