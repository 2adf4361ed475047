"""``omnirelay batch``: starts the stack, or uses a running one, and answers a file of prompts."""

import argparse
import asyncio
from functools import partial
from typing import Final

from omnirelay.cli.__main__ import INTERRUPTED
from omnirelay.cli.output import note
from omnirelay.cli.progress import ProgressLine
from omnirelay.cli.target import Target, target_of
from omnirelay.protocol import GenerateRequest
from omnirelay.tasks import all_of
from ops import checkpoint
from ops.batch.prompts import BatchJob, read_jobs
from ops.batch.results import FAILURES, ResultFolder
from ops.batch.runner import Tally, answer_jobs, concurrency_of
from ops.console import hide
from ops.launcher import Stack, work_with
from ops.target import own_target
from ops.up import run_until_stopped
from shared.config import load_config

SERVED_ELSEWHERE: Final = 32
"""Open requests at a gateway whose configuration is unknown."""

REPORT_S: Final = 10.0
"""Interval of progress lines without a terminal."""


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
        asyncio.run(_answer(target_of(arguments), arguments, tally, SERVED_ELSEWHERE))
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
    # Else the gateway would refuse every line.
    arguments.text_only |= config.text_only
    checkpoint.prepare(config)
    target = own_target(config)
    work = partial(_answer, target, arguments, tally, concurrency_of(config))
    stack = Stack(config, arguments.config, hide)
    return asyncio.run(run_until_stopped(stack, work_with(stack, work)))


async def _answer(target: Target, arguments: argparse.Namespace, tally: Tally, at_once: int) -> None:
    """Answer the prompts without a result, ``at_once`` if no option says how many.

    Raises:
        OmniRelayError: The gateway is gone or stopping, or a file cannot be read or written.
    """

    def request(job: BatchJob) -> GenerateRequest:
        return job.request(arguments.prompts.parent, arguments.text_only)

    with ResultFolder(arguments.out) as results, ProgressLine(lambda: tally.estimate) as progress:
        async with target.client() as client:
            report = asyncio.create_task(_report(tally, progress.visible))
            jobs, count = read_jobs(arguments.prompts), arguments.concurrency or at_once
            try:
                await all_of(answer_jobs(client, jobs, request, results, tally) for _ in range(count))
            finally:
                report.cancel()


async def _report(tally: Tally, visible: bool) -> None:
    """Write how far the batch is, where no progress line shows it."""
    while not visible:
        await asyncio.sleep(REPORT_S)
        note(tally.estimate)
