"""A conversation over standard input, from a terminal or a pipe."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import Final

from omnirelay.cli.chat.answer import FiguresPrinter, JsonPrinter, Listener, TextPrinter
from omnirelay.cli.chat.camera import Camera
from omnirelay.cli.chat.conversation import ChatSession
from omnirelay.cli.chat.slash import COMMANDS, Leave, perform
from omnirelay.cli.output import fail, note
from omnirelay.cli.target import target_of
from omnirelay.client.player import Player
from omnirelay.errors import OmniRelayError, OutputError, StandardOutputError
from omnirelay.protocol import GenerateRequest

PROMPT: Final = "> "


def run(
    arguments: argparse.Namespace, template: GenerateRequest, player: Player | None, camera: Camera | None
) -> int:
    """Hold a conversation until its end.

    Returns:
        The exit status: 1 if a line of a pipe failed, else 0.

    Raises:
        OmniRelayError: The gateway does not answer at the start, or the history cannot be read or written.
        KeyboardInterrupt: Ctrl-C, when reading from a pipe.
    """
    at_terminal = sys.stdin.isatty()

    def make_printers() -> list[Listener]:
        if arguments.json:
            return [JsonPrinter()]
        return [TextPrinter(), *([FiguresPrinter()] if arguments.verbose else [])]

    target = target_of(arguments)
    conversation = ChatSession(target, template, make_printers, player, camera)
    model = conversation.status().gateway.model
    try:
        if not at_terminal:
            return _read_all(conversation, arguments.json)
        note(f"{target}, {model}; /help lists the commands")
        with _line_editing(arguments.history):
            _converse(conversation, arguments.json)
        return 0
    finally:
        conversation.hush()


def _read_all(conversation: ChatSession, as_json: bool) -> int:
    failed = False
    while (line := _read("")) is not None:
        try:
            _take(conversation, line)
            conversation.hear_out()
        except OmniRelayError as error:
            failed = True
            _report(error, as_json)
        except Leave:
            break
        conversation.check_player()
    return int(failed)


def _converse(conversation: ChatSession, as_json: bool) -> None:
    prompt = PROMPT if sys.stdout.isatty() else ""
    while True:
        conversation.check_player()
        try:
            line = _read(prompt)
        except KeyboardInterrupt:
            note("")
            if conversation.playing:
                conversation.hush()
            elif not _typed():
                return
            continue
        if line is None:
            note("")
            return
        try:
            _take(conversation, line)
        except OmniRelayError as error:
            _report(error, as_json)
        except KeyboardInterrupt:
            note("stopped")
        except Leave:
            return


def _read(prompt: str) -> str | None:
    """The next line; None at the end of input."""
    try:
        return input(prompt)
    except EOFError:
        return None


def _typed() -> bool:
    """Whether the line that Ctrl-C interrupted had something in it."""
    readline = sys.modules.get("readline")
    return readline is not None and bool(readline.get_line_buffer())


def _take(conversation: ChatSession, line: str) -> None:
    if line.startswith("/"):
        perform(conversation, line)
    elif line.strip() or conversation.attached:
        # An empty line sends the attachments alone, such as a spoken question.
        conversation.ask(line.strip())


def _report(error: OmniRelayError, as_json: bool) -> None:
    if isinstance(error, StandardOutputError):
        # Nobody would see the next answers.
        raise error
    fail(error, as_json)


@contextmanager
def _line_editing(history: Path | None) -> Iterator[None]:
    """Line editing, history and completion, if Python has readline."""
    try:
        import readline  # noqa: PLC0415 - it takes hold of the terminal
    except ImportError:
        note("this Python has no readline: no line editing and history")
        yield
        return

    def complete(text: str, state: int) -> str | None:
        found = list(_completions(readline.get_line_buffer(), text))
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
    with _history_errors(history):
        if history is not None and history.exists():
            readline.read_history_file(history)
    try:
        yield
    finally:
        with _history_errors(history):
            if history is not None:
                history.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(history)


@contextmanager
def _history_errors(history: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot keep the history in {history}: {error.strerror}") from error


def _completions(line: str, text: str) -> Iterator[str]:
    """Completions of the last word of a line."""
    name, space, _ = line.partition(" ")
    if not space and line.startswith("/"):
        for known, command in COMMANDS.items():
            if known.startswith(text):
                yield f"{known} " if command.argument else known
    elif name in COMMANDS and "FILE" in COMMANDS[name].argument:
        for path in sorted(glob(f"{escape(text)}*")):
            yield f"{path}/" if Path(path).is_dir() else path
