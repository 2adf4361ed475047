"""What a line of a conversation can be besides a message: a command that begins with a slash."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from omnirelay.cli.chat.conversation import ChatSession
from omnirelay.cli.output import note
from omnirelay.errors import InvalidRequestError
from omnirelay.values import MediaKind


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        argument: What stands behind it; empty if nothing does, in brackets if it may be left out.
        help: What it does.
        run: Does it.
    """

    argument: str
    help: str
    run: Callable[[ChatSession, str], None]


class Leave(Exception):  # noqa: N818  Not an error.
    """The user wants to leave."""


def perform(conversation: ChatSession, line: str) -> None:
    """Do what a line says that begins with a slash.

    Raises:
        InvalidRequestError: There is no such command, or it lacks its argument.
        OmniRelayError: It cannot be done.
        Leave: It is to leave.
    """
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise InvalidRequestError(
            f"there is no command {name}; /help lists them, and a space before a message makes it one"
        )
    argument = _unquoted(argument.strip())
    if bool(argument) != bool(command.argument) and not command.argument.startswith("["):
        wanted = f"{name} {command.argument}".strip()
        raise InvalidRequestError(f"the command is: {wanted}")
    command.run(conversation, argument)


def _unquoted(argument: str) -> str:
    """A name as file managers drop it into a terminal, in quotes."""
    quoted = len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "'\""
    return argument[1:-1] if quoted else argument


def _attach(kind: MediaKind, conversation: ChatSession, source: str) -> None:
    note(f"{conversation.attach(kind, source)} goes with the next message: {source}")


def _voice(conversation: ChatSession, name: str) -> None:
    if name:
        conversation.choose_voice(name)
    else:
        note(f"voices: {', '.join(conversation.voices()) or 'not known while the stages start'}")


def _save(conversation: ChatSession, name: str) -> None:
    note(f"written: {name}, {conversation.save(Path(os.path.expanduser(name))):.1f} s")


def _forget(conversation: ChatSession, _: str) -> None:
    conversation.forget()
    note("a new conversation")


def _help(_: ChatSession, __: str) -> None:
    calls = {f"{name} {command.argument}": command.help for name, command in COMMANDS.items()}
    width = max(map(len, calls))
    for call, meaning in calls.items():
        note(f"{call.ljust(width)}  {meaning}")


def _leave(_: ChatSession, __: str) -> None:
    raise Leave


COMMANDS: Final = {
    "/audio": Command("FILE", "a sound goes with the next message", partial(_attach, "audio")),
    "/image": Command("FILE", "a picture goes with the next message", partial(_attach, "image")),
    "/video": Command("FILE", "a video goes with the next message", partial(_attach, "video")),
    "/voice": Command("[NAME]", "answer in this voice from now on; list the voices", _voice),
    "/save": Command("FILE.wav", "write the speech of the last answer", _save),
    "/new": Command("", "begin a new conversation", _forget),
    "/help": Command("", "show the commands", _help),
    "/quit": Command("", "leave, as Ctrl-D and Ctrl-C at the prompt do", _leave),
}
