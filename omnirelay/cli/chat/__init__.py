"""``omnirelay chat``: one request, or a conversation; shown as it comes, and played."""

from omnirelay.cli.chat.command import run

__all__ = ["run"]
