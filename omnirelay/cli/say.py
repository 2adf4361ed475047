"""``omnirelay say``: a text is read aloud as it is, while it comes."""

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import ExitStack
from threading import Thread

from omnirelay.cli.chat.answer import JsonPrinter, Listener, WavWriter, read
from omnirelay.cli.output import note
from omnirelay.cli.target import target_of
from omnirelay.client.player import PLAYER_NAMES, Playback, find_player
from omnirelay.client.wav import require_wav
from omnirelay.errors import InvalidRequestError


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        OmniRelayError: It failed.
        SystemExit: The speech would be neither played nor written.
    """
    plays = arguments.out is None if arguments.play is None else arguments.play
    player = find_player() if plays else None
    if plays and player is None:
        arguments.refuse_usage(f"give --out FILE.wav --no-play, or install one of {PLAYER_NAMES}")
    listeners: list[Listener] = [JsonPrinter()] if arguments.json else []
    if arguments.out is not None:
        require_wav(arguments.out)
        listeners.append(WavWriter(arguments.out))
    how = {"voice": arguments.voice, "system": arguments.system, "seed": arguments.seed}
    with ExitStack() as stack:
        if player is not None:
            playback = stack.enter_context(Playback(player))
            listeners.append(playback)
        text = _lines() if arguments.text is None else arguments.text
        asyncio.run(read(target_of(arguments), text, listeners, **how))
    if player is not None and playback.problem:
        note(f"the speech was not played completely: {playback.problem}")
    return 0


async def _lines() -> AsyncGenerator[str, None]:
    """The lines of standard input as they come."""
    while line := await asyncio.wrap_future(_next_line()):
        yield line


def _next_line() -> "Future[str]":
    """Wait for a line on a thread that, unlike one of an executor, is not waited for at the end."""
    line: Future[str] = Future()
    line.set_running_or_notify_cancel()

    def read() -> None:
        try:
            line.set_result(sys.stdin.readline())
        except (AttributeError, OSError, ValueError):
            line.set_exception(InvalidRequestError("give TEXT: the standard input cannot be read"))

    Thread(target=read, daemon=True).start()
    return line
