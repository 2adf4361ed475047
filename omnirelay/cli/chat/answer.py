"""Streams one answer to those who show, play or keep it."""

import os
import sys
from collections.abc import AsyncIterable, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from omnirelay.cli.output import MIB, WordWrap, mebibytes, note, printable, say, say_json, timing_lines
from omnirelay.cli.progress import ProgressLine
from omnirelay.cli.target import Target
from omnirelay.client.transport.outbox import UploadProgress
from omnirelay.client.types import ChatEvent, TimedDoneEvent
from omnirelay.client.wav import write_wav
from omnirelay.events import AudioEvent, TextEvent
from omnirelay.protocol import GenerateRequest

LARGE_BYTES: Final = 4 * MIB
"""Uploads of this size show progress if they take longer than :data:`PATIENCE_S`."""
PATIENCE_S: Final = 0.5


class Listener(Protocol):
    """Takes the events of one answer."""

    def show(self, event: ChatEvent) -> None:
        """Take the next event."""
        ...


class TextPrinter:
    """Prints the text of one answer as it comes; at a terminal broken between words."""

    def __init__(self) -> None:
        self._begun = False
        plain = not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb"
        self._wrap = None if plain else WordWrap()

    def show(self, event: ChatEvent) -> None:
        """Take the next event."""
        if isinstance(event, TextEvent):
            text = printable(event.text if self._begun else event.text.lstrip())
            self._begun = self._begun or bool(text)
            say(self._wrap.take(text) if self._wrap else text, end="")
        elif isinstance(event, TimedDoneEvent):
            say("")


class FiguresPrinter:
    """Writes the timing at the end of an answer, to standard error if not told otherwise."""

    def __init__(self, write: Callable[[str], None] = note) -> None:
        self._write = write

    def show(self, event: ChatEvent) -> None:
        """Take the next event."""
        if isinstance(event, TimedDoneEvent):
            self._write("\n".join(["", *timing_lines(event)]))


class JsonPrinter:
    """Prints one JSON object per line."""

    def show(self, event: ChatEvent) -> None:
        """Take the next event."""
        if isinstance(event, TextEvent):
            say_json(event="text", text=event.text, token_ids=event.token_ids)
        elif isinstance(event, AudioEvent):
            delay = {"start_delay_ms": event.start_delay_ms} if event.start_delay_ms else {}
            say_json(event="audio", seq=event.seq, samples=event.sample_count, **delay)
        else:
            say_json(event="done", **msgspec.to_builtins(event))


class Recorder:
    """Keeps the text and speech received so far."""

    def __init__(self) -> None:
        self.text = ""
        self._pieces: list[bytes] = []

    @property
    def waveform(self) -> bytes:
        """The speech so far, as PCM."""
        return b"".join(self._pieces)

    def show(self, event: ChatEvent) -> None:
        """Take the next event."""
        if isinstance(event, TextEvent):
            self.text += event.text
        elif isinstance(event, AudioEvent):
            self._pieces.append(event.pcm)


class WavWriter(Recorder):
    """Writes the speech to a file when the answer is complete."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def show(self, event: ChatEvent) -> None:
        """Take the next event.

        Raises:
            OutputError: The file cannot be written.
        """
        super().show(event)
        if isinstance(event, TimedDoneEvent):
            write_wav(self._path, self.waveform)


async def read(target: Target, text: str | AsyncIterable[str], to: Iterable[Listener], **how: Any) -> None:
    """Have a text read on a connection of its own; as :func:`stream`, with options of ``speak``."""
    async with target.client() as client, aclosing(client.speak(text, **how)) as events:
        async for event in events:
            for listener in to:
                listener.show(event)


async def stream(target: Target, request: GenerateRequest, listeners: Iterable[Listener]) -> None:
    """Send a request on its own connection, and pass each event to all listeners in order.

    Cancelling the task disconnects, which cancels the request.

    Raises:
        OmniRelayError: The gateway cannot be reached, the request failed, or a listener failed.
    """
    async with target.client() as client:
        answer = client.chat(request)
        with ProgressLine(lambda: _describe(answer.upload), PATIENCE_S):
            async for event in answer:
                for listener in listeners:
                    listener.show(event)


def _describe(upload: UploadProgress) -> str:
    """Progress of a large upload; empty once it is complete, since the answer may arrive then."""
    if upload.total_bytes < LARGE_BYTES or upload.sent_bytes == upload.total_bytes:
        return ""
    return f"sending {mebibytes(upload.sent_bytes)} of {mebibytes(upload.total_bytes)}"
