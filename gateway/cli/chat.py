"""``omnirelay chat``: one request, streamed."""

import argparse
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from gateway.cli.output import say, say_json, timing_lines, write_wav
from gateway.client import (
    AudioEvent,
    ChatEvent,
    ChatOptions,
    DoneEvent,
    GatewayClient,
    SamplingOverrides,
    TextEvent,
)
from gateway.client.types import Samples
from shared.errors import OmniRelayError


class Printer(Protocol):
    """Shows the events of one answer."""

    def show(self, event: ChatEvent) -> None:
        """Show an event."""
        ...


class HumanPrinter:
    """Text as it comes, figures at the end."""

    def show(self, event: ChatEvent) -> None:
        """Show an event."""
        if isinstance(event, TextEvent):
            say(event.text, end="")
        elif isinstance(event, DoneEvent):
            say("\n")
            say("\n".join(timing_lines(event)))


class JsonPrinter:
    """One JSON object a line."""

    def show(self, event: ChatEvent) -> None:
        """Show an event."""
        if isinstance(event, TextEvent):
            say_json(event="text", text=event.text, token_ids=event.token_ids)
        elif isinstance(event, AudioEvent):
            say_json(event="audio", seq=event.seq, samples=event.samples.size)
        else:
            say_json(event="done", **_done_fields(event))


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        OmniRelayError: It failed; with ``--json`` it is told as JSON instead.
        SystemExit: There is nothing to send.
    """
    if arguments.text is None and not (arguments.audio or arguments.image or arguments.video):
        arguments.refuse_usage("give TEXT, --audio, --image or --video")
    try:
        printer = JsonPrinter() if arguments.json else HumanPrinter()
        stream(arguments.gateway, arguments.text or "", _options(arguments), printer, arguments.out)
    except OmniRelayError as error:
        if not arguments.json:
            raise
        say_json(event="error", code=error.code, message=str(error))
        return 1
    return 0


def stream(address: str, text: str, options: ChatOptions, printer: Printer, out: Path | None) -> None:
    """Send a request, show its answer, and write the speech to ``out``.

    Raises:
        OmniRelayError: The gateway cannot be reached, the request failed, or the file cannot be written.
    """
    pieces: list[Samples] = [np.zeros(0, np.float32)]
    with GatewayClient(address) as client, client.chat(text, **options) as answer:
        for event in answer:
            if isinstance(event, AudioEvent):
                pieces.append(event.samples)
            elif isinstance(event, DoneEvent) and out is not None and options.get("speech", True):
                # Before the end is shown, so that who reads it finds the file.
                write_wav(out, np.concatenate(pieces))
            printer.show(event)


def _options(arguments: argparse.Namespace) -> ChatOptions:
    temperature = 0.0 if arguments.greedy else None
    return ChatOptions(
        system=arguments.system,
        audio=arguments.audio,
        images=arguments.image,
        videos=arguments.video,
        use_audio_in_video=arguments.use_audio_in_video,
        speech=not arguments.text_only,
        speaker=arguments.speaker,
        seed=arguments.seed,
        text_sampling=SamplingOverrides(temperature=temperature, max_tokens=arguments.max_tokens),
        codec_sampling=SamplingOverrides(temperature=temperature, max_tokens=arguments.max_codec_tokens),
    )


def _done_fields(done: DoneEvent) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(done)
    return fields
