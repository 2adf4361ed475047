"""``omnirelay up``: the stack in the foreground until Ctrl-C."""

import argparse
import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

from gateway.cli import checkpoint
from gateway.cli.console import console
from gateway.cli.launcher import Stack, running
from gateway.cli.output import announce
from shared.config import ENV_PREFIX, Config, load_config


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        OmniRelayError: The stack could not start, or one of its processes ended.
    """
    asked = {f"{ENV_PREFIX}TEXT_ONLY": "true"} if arguments.text_only else {}
    config = load_config(arguments.config, os.environ | asked)
    console.form = config.log_format
    checkpoint.ensure(config)
    stack = Stack(config, arguments.config)
    asyncio.run(until_told_to_stop(stack, _serve(stack, _addresses(config)), config.gateway.drain_s))
    announce("stopped")
    console.flush()
    return 0


async def until_told_to_stop(stack: Stack, work: Coroutine[Any, Any, None], drain_s: float = 0.0) -> bool:
    """Run until the work ends, or is cancelled by SIGINT or SIGTERM; a second one hurries the stop.

    Args:
        stack: What the work starts and stops.
        work: What is to be done.
        drain_s: How long the requests of others have; 0 if there are none, and the first signal hurries.

    Returns:
        True if the work came to its own end.
    """
    task = asyncio.create_task(work)
    told: list[int] = []

    def stop(number: int) -> None:
        if not told:
            more = f" (requests have up to {drain_s:g} s; once more ends them now)" if drain_s else ""
            announce(f"stopping ...{more}")
            task.cancel()
        if told or not drain_s:
            stack.hurry()
        told.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not told:
            raise
        return False
    return True


def _addresses(config: Config) -> str:
    """Where clients connect, the way each protocol writes it."""
    http = config.gateway.http
    return config.gateway.listen + (f", {http.replace('tcp:', 'http:')}" if http else "")


async def _serve(stack: Stack, addresses: str) -> None:
    async with running(stack) as report:
        only = ", text only" if report.gateway.text_only else ""
        announce(f"ready: {addresses} (model {report.gateway.model}{only})")
        await stack.watch()
