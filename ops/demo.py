"""``omnirelay demo``: the whole stack from start to stop, with one real request in between."""

import argparse
import asyncio
import os
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Final

from omnirelay import SamplingOverrides, build_request
from omnirelay.cli.__main__ import INTERRUPTED
from omnirelay.cli.chat.answer import FiguresPrinter, Listener, TextPrinter, WavWriter, stream
from omnirelay.cli.output import mebibytes, say
from omnirelay.cli.target import Target
from omnirelay.client.wav import require_wav
from omnirelay.values import API_KEY_VARIABLE
from ops import checkpoint
from ops.console import console
from ops.launcher import Stack, running
from ops.target import own_target
from ops.up import until_told_to_stop
from shared.config import load_config

OUT: Final = Path("out/reply.wav")
"""Where the speech goes if nothing else is said; only this folder is made."""
PROMPT: Final = "Answer the question that you hear."
QUESTION: Final = "question.ogg"
PICTURE: Final = "picture.png"
DESCRIBED: Final = {
    QUESTION: 'Ogg Opus, 2.2 s, "What can you see in this picture?"',
    PICTURE: "PNG, 336 x 252 pixels, a house, a tree and the sun",
}
"""What the files of ``assets`` hold, which ``scripts/make_demo_media.py`` made."""


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        OmniRelayError: The file cannot be written, the stack could not start, or the request failed.
    """
    out: Path = OUT if arguments.out is None else arguments.out
    if arguments.out is None:
        OUT.parent.mkdir(exist_ok=True)
    require_wav(out)
    config = load_config()
    target = replace(own_target(config), api_key=os.environ.get(API_KEY_VARIABLE))
    checkpoint.ensure(config)
    checkpoint.check(config)
    stack = Stack(config, None, console.show if arguments.verbose else _hide)
    say("starting the four processes ...")
    ended = asyncio.run(until_told_to_stop(stack, _demonstrate(stack, target, out)))
    say("stopped" if ended else "interrupted")
    return 0 if ended else INTERRUPTED


async def _demonstrate(stack: Stack, target: Target, out: Path) -> None:
    async with running(stack):
        files = {name: _read(name) for name in DESCRIBED}
        say("")
        for label, name in (("audio: ", QUESTION), ("image: ", PICTURE)):
            say(f"{label} {name}, {DESCRIBED[name]}, {len(files[name]):,} bytes")
        say(f"prompt: {PROMPT}\nanswer: ", end="")
        request = build_request(
            PROMPT,
            audio=files[QUESTION],
            images=files[PICTURE],
            seed=1,
            # Bounded, because a random checkpoint does not know when to stop.
            text_sampling=SamplingOverrides(max_tokens=48),
            codec_sampling=SamplingOverrides(max_tokens=256),
        )
        listeners: list[Listener] = [WavWriter(out), TextPrinter(), FiguresPrinter()]
        talk = asyncio.create_task(stream(target, request, listeners))
        watch = asyncio.create_task(stack.watch())
        done, _ = await asyncio.wait([talk, watch], return_when=asyncio.FIRST_COMPLETED)
        # If a process died, that is why the request failed, and what is to be told.
        await (watch if watch in done else talk)
        talk.cancel()
        watch.cancel()
        say(f"written:             {out}")
        await _show_memory(target)
        say("stopping the four processes ...")


async def _show_memory(target: Target) -> None:
    report = await target.status()
    peaks = {"gateway": report.gateway.peak_memory_bytes}
    peaks |= {stage.name: stage.peak_memory_bytes for stage in report.stages}
    shown = ", ".join(f"{name} {mebibytes(peak)}" for name, peak in peaks.items())
    say(f"peak memory:         {shown}; together {mebibytes(sum(peaks.values()))}")


def _read(name: str) -> bytes:
    return resources.files("ops").joinpath("assets", name).read_bytes()


def _hide(name: str, line: str) -> None:
    """Show nothing: the last lines of a process that fails are told with its failure."""
    del name, line
