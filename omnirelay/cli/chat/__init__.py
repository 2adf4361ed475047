"""``omnirelay chat``: one request or a conversation, streamed and played."""

from omnirelay.cli.chat.command import run

__all__ = ["run"]
