"""``omnirelay demo``: the whole stack from start to stop, with real requests in between."""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Final

from omnirelay import GenerateRequest, SamplingOverrides, build_request
from omnirelay.cli.__main__ import INTERRUPTED
from omnirelay.cli.chat.answer import FiguresPrinter, Listener, TextPrinter, WavWriter, stream
from omnirelay.cli.output import mebibytes, printable, say
from omnirelay.cli.target import Target
from omnirelay.client.wav import require_wav
from omnirelay.errors import CheckpointError
from ops import checkpoint
from ops.console import console, hide
from ops.launcher import Stack, work_with
from ops.target import own_target
from ops.up import run_until_stopped
from shared.checkpoints import find_model
from shared.config import load_config
from shared.starters import Starter, load_starters, read_media

OUT: Final = Path("out/reply.wav")
"""Where the speech goes if nothing else is said, numbered if there are several; only this folder is made."""
PROMPT: Final = "Answer the question that you hear."
QUESTION: Final = "question.ogg"
PICTURE: Final = "picture.png"
DESCRIBED: Final = {
    QUESTION: 'Ogg Opus, 2.2 s, "What can you see in this picture?"',
    PICTURE: "PNG, 336 x 252 pixels, a house, a tree and the sun",
}
"""What the files of ``assets`` hold, made with espeak-ng and Pillow."""


@dataclass(frozen=True)
class DemoQuestion:
    """One question of the demonstration.

    Attributes:
        lines: What is sent, in words.
        prompt: What is typed.
        audio: A recording.
        image: A picture.
    """

    lines: Sequence[str]
    prompt: str
    audio: bytes | None = None
    image: bytes | None = None

    @property
    def request(self) -> GenerateRequest:
        """What is sent."""
        return build_request(
            self.prompt,
            audio=() if self.audio is None else self.audio,
            images=() if self.image is None else self.image,
            seed=1,
            # Bounded, because a random checkpoint does not know when to stop.
            text_sampling=SamplingOverrides(max_tokens=48),
            codec_sampling=SamplingOverrides(max_tokens=256),
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        OmniRelayError: The file cannot be written, the stack could not start, or the request failed.
    """
    out: Path = OUT if arguments.out is None else arguments.out
    if arguments.out is None:
        # `require_wav` says in words what is wrong with the folder.
        with suppress(OSError):
            OUT.parent.mkdir(exist_ok=True)
    require_wav(out)
    config = load_config()
    target = own_target(config)
    checkpoint.prepare(config)
    stack = Stack(config, None, console.show if arguments.verbose else hide)
    asked = questions(find_model(config))
    say("starting the four processes ...")
    ended = asyncio.run(run_until_stopped(stack, work_with(stack, partial(_demonstrate, target, asked, out))))
    say("stopped" if ended else "interrupted")
    return 0 if ended else INTERRUPTED


def questions(model: Path | None) -> list[DemoQuestion]:
    """Return what is asked: a typed, a spoken and a seen question that the checkpoint brings, or one of ours.

    ``model`` is the checkpoint's directory, None if it is not on this machine yet.
    """
    starters = [] if model is None else load_starters(model)
    kinds = (
        [each for each in starters if each.typed],
        [each for each in starters if each.audio is not None],
        [each for each in starters if each.image is not None and each.audio is None],
    )
    chosen = [found[0] for found in kinds if found]
    if model is None or not chosen:
        return [_bundled()]
    return [_brought(model, starter) for starter in chosen]


def _brought(model: Path, starter: Starter) -> DemoQuestion:
    """Make a question of a starter.

    Raises:
        CheckpointError: Its files cannot be read.
    """
    lines = []
    if starter.audio is not None:
        lines.append(f'audio:  {printable(starter.audio)}, "{printable(starter.says)}"')
    if starter.image is not None:
        lines.append(f"image:  {starter.image}")
    if starter.text:
        lines.append(f"prompt: {printable(starter.text)}")
    return DemoQuestion(lines, starter.text, _media(model, starter.audio), _media(model, starter.image))


def _media(model: Path, name: str | None) -> bytes | None:
    try:
        return None if name is None else read_media(model, name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name} of {model} cannot be used: {error}") from error


def _bundled() -> DemoQuestion:
    files = {name: _read(name) for name in DESCRIBED}
    lines = [
        f"{label} {name}, {DESCRIBED[name]}, {len(files[name]):,} bytes"
        for label, name in (("audio: ", QUESTION), ("image: ", PICTURE))
    ]
    return DemoQuestion([*lines, f"prompt: {PROMPT}"], PROMPT, files[QUESTION], files[PICTURE])


def _place(out: Path, number: int, of: int) -> Path:
    return out if of == 1 else out.with_name(f"{out.stem}-{number}{out.suffix}")


async def _demonstrate(target: Target, asked: Sequence[DemoQuestion], out: Path) -> None:
    for number, question in enumerate(asked, 1):
        say("")
        for line in question.lines:
            say(line)
        say("answer: ", end="")
        place = _place(out, number, len(asked))
        listeners: list[Listener] = [WavWriter(place), TextPrinter(), FiguresPrinter(say)]
        await stream(target, question.request, listeners)
        say(f"written:             {place}")
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
