"""``omnirelay batch``: starts the stack, or uses a running one, and answers a file of prompts."""

import argparse
import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from omnirelay.cli.__main__ import INTERRUPTED
from omnirelay.cli.output import note
from omnirelay.cli.progress import ProgressLine
from omnirelay.cli.target import Target, target_of
from omnirelay.values import API_KEY_VARIABLE
from ops import checkpoint
from ops.batch.prompts import read_jobs
from ops.batch.results import FAILURES, ResultFolder
from ops.batch.runner import BatchRunner, Tally
from ops.launcher import Stack, running
from ops.target import own_target
from ops.up import until_told_to_stop
from shared.config import Config, load_config

SERVED_ELSEWHERE: Final = 32
"""Open requests at a gateway whose configuration is unknown."""

REPORT_S: Final = 10.0
"""Interval of progress lines without a terminal."""


@dataclass(frozen=True)
class _Batch:
    """The options of one run."""

    prompts: Path
    out: Path
    text_only: bool
    concurrency: int

    async def answer(self, target: Target, tally: Tally) -> None:
        """Answer the prompts without a result.

        Raises:
            OmniRelayError: The gateway is gone or stopping, or a file cannot be read or written.
        """
        with ResultFolder(self.out) as results, ProgressLine(lambda: tally.estimate) as progress:
            async with target.client() as client, AsyncExitStack() as tasks:
                if not progress.visible:
                    tasks.push_async_callback(_end, asyncio.create_task(_report(tally)))
                runner = BatchRunner(client, results, self.prompts.parent, self.text_only, tally)
                await runner.run(read_jobs(self.prompts), self.concurrency)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Returns:
        0 if every prompt has an answer, 1 if one failed, 130 if it was interrupted.

    Raises:
        OmniRelayError: The stack could not start or the gateway cannot be reached, the input cannot be read,
            or the output cannot be written.
    """
    tally = Tally(sum(1 for _ in read_jobs(arguments.prompts)))
    if arguments.gateway is not None:
        concurrency = arguments.concurrency or SERVED_ELSEWHERE
        batch = _Batch(arguments.prompts, arguments.out, arguments.text_only, concurrency)
        asyncio.run(batch.answer(target_of(arguments), tally))
        ended = True
    else:
        ended = _run_with_own_stack(arguments, tally)
    note(tally.summary)
    if not ended:
        note("interrupted: the same command resumes")
        return INTERRUPTED
    if tally.failed:
        note(f"why those failed is in {arguments.out / FAILURES}")
    return 1 if tally.failed else 0


def _run_with_own_stack(arguments: argparse.Namespace, tally: Tally) -> bool:
    config = load_config(arguments.config)
    checkpoint.ensure(config)
    checkpoint.check(config)
    target = replace(own_target(config), api_key=os.environ.get(API_KEY_VARIABLE))
    concurrency = arguments.concurrency or _enough(config)
    batch = _Batch(arguments.prompts, arguments.out, arguments.text_only, concurrency)
    stack = Stack(config, arguments.config, _hide)
    return asyncio.run(until_told_to_stop(stack, _answer_with(stack, batch, target, tally)))


async def _answer_with(stack: Stack, batch: _Batch, target: Target, tally: Tally) -> None:
    async with running(stack), AsyncExitStack() as tasks:
        answers = asyncio.create_task(batch.answer(target, tally))
        watch = asyncio.create_task(stack.watch())
        for task in (answers, watch):
            tasks.push_async_callback(_end, task)
        done, _ = await asyncio.wait([answers, watch], return_when=asyncio.FIRST_COMPLETED)
        # If the stack ended, that is the error to report.
        await (watch if watch in done else answers)


async def _report(tally: Tally) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        note(tally.estimate)


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _enough(config: Config) -> int:
    """Twice the active requests, so that the stages never wait for the next one."""
    limits = config.gateway.limits
    return min(2 * limits.max_active, limits.max_active + limits.max_queued, limits.max_queued_per_client)


def _hide(name: str, line: str) -> None:
    """Show nothing: the error of a failed process has its last lines."""
    del name, line
