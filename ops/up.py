"""``omnirelay up`` and ``serve``: the stack in the foreground until Ctrl-C."""

import argparse
import asyncio
import os
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from omnirelay.errors import OmniRelayError
from ops import checkpoint
from ops.addresses import overrides, urls
from ops.console import announce, console
from ops.launcher import RENEW, Stack, running
from shared.config import Config, load_config


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Returns:
        0 when it was stopped; 1 for an error that is a JSON line, as all its lines are.

    Raises:
        OmniRelayError: The stack could not start, or one of its processes ended.
    """
    asked = overrides(arguments)
    config = load_config(arguments.config, os.environ | asked)
    console.form = config.log_format
    try:
        checkpoint.prepare(config)
        stack = Stack(config, arguments.config, environment=asked)
        asyncio.run(run_until_stopped(stack, _serve(stack, config), config.gateway.drain_s))
    except OmniRelayError as error:
        if config.log_format != "json":
            raise
        console.report(error)
        return 1
    announce("stopped")
    console.flush()
    return 0


async def run_until_stopped(stack: Stack, work: Coroutine[Any, Any, None], drain_s: float = 0.0) -> bool:
    """Run until the work ends, or SIGINT or SIGTERM cancels it; a second signal ends open requests.

    SIGHUP lets the processes reload their files, or stops the stack if the controlling terminal was closed.

    Args:
        stack: What the work starts and stops.
        work: The work.
        drain_s: Grace period for open requests; with 0 the first signal ends them.

    Returns:
        True if the work ended by itself.
    """
    task = asyncio.create_task(work)
    signals: list[int] = []

    def stop(number: int) -> None:
        if not signals:
            more = f" (requests have up to {drain_s:g} s; once more ends them now)" if drain_s else ""
            announce(f"stopping ...{more}")
            task.cancel()
        if signals or not drain_s:
            stack.hurry()
        signals.append(number)

    def hang_up() -> None:
        if signals:
            return
        if at_terminal and not _has_terminal():
            stop(signal.SIGHUP)
        else:
            stack.reload()

    # `nohup` ignores SIGHUP from the start.
    at_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
    asyncio.get_running_loop().add_signal_handler(RENEW, stack.renew)
    try:
        await task
    except asyncio.CancelledError:
        if not signals:
            raise
        return False
    return True


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        return True
    return False


async def _serve(stack: Stack, config: Config) -> None:
    numbers = range(1, config.gateway.replicas + 1)
    addresses = ", ".join(url for number in numbers for url in urls(config, number))
    async with running(stack) as report:
        only = ", text only" if report.gateway.text_only else ""
        announce(f"ready: {addresses} (model {report.gateway.model}{only})")
        await stack.watch()
