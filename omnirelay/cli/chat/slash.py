"""Slash commands of a conversation."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from omnirelay.cli.chat.conversation import ChatSession
from omnirelay.cli.output import columns, note
from omnirelay.errors import InvalidRequestError
from omnirelay.values import MediaKind


@dataclass(frozen=True)
class Command:
    """A slash command.

    Attributes:
        argument: Name of its argument; empty if it has none, in brackets if it is optional.
        help: What it does.
        run: Its implementation.
    """

    argument: str
    help: str
    run: Callable[[ChatSession, str], None]


class Leave(Exception):  # noqa: N818  Not an error.
    """The user ends the conversation."""


def perform(conversation: ChatSession, line: str) -> None:
    """Run a slash command.

    Raises:
        InvalidRequestError: The command is unknown or lacks its argument.
        OmniRelayError: It failed.
        Leave: The user ends the conversation.
    """
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise InvalidRequestError(
            f"unknown command {name}; /help lists them; to send it as a message, put a space before it"
        )
    argument = _unquoted(argument.strip())
    if bool(argument) != bool(command.argument) and not command.argument.startswith("["):
        wanted = f"{name} {command.argument}".strip()
        raise InvalidRequestError(f"usage: {wanted}")
    command.run(conversation, argument)


def _unquoted(argument: str) -> str:
    """Remove the quotes that file managers put around a path."""
    quoted = len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "'\""
    return argument[1:-1] if quoted else argument


def _attach(kind: MediaKind, conversation: ChatSession, source: str) -> None:
    note(f"{conversation.attach(kind, source)} attached to the next message: {source}")


def _voice(conversation: ChatSession, name: str) -> None:
    if name:
        conversation.choose_voice(name)
    else:
        note(f"voices: {', '.join(conversation.voices()) or 'unknown until the stages have started'}")


def _save(conversation: ChatSession, name: str) -> None:
    note(f"written: {name}, {conversation.save(Path(os.path.expanduser(name))):.1f} s")


def _forget(conversation: ChatSession, _: str) -> None:
    conversation.forget()
    note("a new conversation")


def _help(_: ChatSession, __: str) -> None:
    calls = {f"{name} {command.argument}": command.help for name, command in COMMANDS.items()}
    width = max(map(len, calls))
    narrow = width + max(map(len, calls.values())) + 2 > columns()
    for call, meaning in calls.items():
        note(f"{call}\n  {meaning}" if narrow else f"{call.ljust(width)}  {meaning}")


def _leave(_: ChatSession, __: str) -> None:
    raise Leave


COMMANDS: Final = {
    "/audio": Command("FILE", "attach audio to the next message", partial(_attach, "audio")),
    "/image": Command("FILE", "attach an image to the next message", partial(_attach, "image")),
    "/video": Command("FILE", "attach a video to the next message", partial(_attach, "video")),
    "/voice": Command("[NAME]", "set the voice, or list the voices", _voice),
    "/save": Command("FILE.wav", "write the speech of the last answer", _save),
    "/new": Command("", "start a new conversation", _forget),
    "/help": Command("", "list the commands", _help),
    "/quit": Command("", "leave, as Ctrl-D or Ctrl-C at the prompt", _leave),
}
