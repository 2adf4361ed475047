"""One answer of the gateway, handed on to whoever shows, plays or keeps it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from omnirelay.cli.output import MIB, mebibytes, printable, say, say_json, timing_lines
from omnirelay.cli.progress import ProgressLine
from omnirelay.cli.target import Target
from omnirelay.client.outbox import UploadProgress
from omnirelay.client.types import ChatEvent, TimedDoneEvent
from omnirelay.client.wav import write_wav
from omnirelay.events import AudioEvent, TextEvent
from omnirelay.protocol import GenerateRequest

LARGE_BYTES: Final = 4 * MIB
"""From here on, sending a request is shown, if it takes longer than :data:`PATIENCE_S`."""
PATIENCE_S: Final = 0.5


class Listener(Protocol):
    """Takes the events of one answer as they come."""

    def show(self, event: ChatEvent) -> None:
        """Take the next event."""
        ...


class TextPrinter:
    """Text as it comes."""

    def show(self, event: ChatEvent) -> None:
        """Take the next event."""
        if isinstance(event, TextEvent):
            say(printable(event.text), end="")
        elif isinstance(event, TimedDoneEvent):
            say("")


class FiguresPrinter:
    """How long an answer took, at its end."""

    def show(self, event: ChatEvent) -> None:
        """Take the next event."""
        if isinstance(event, TimedDoneEvent):
            say("\n".join(["", *timing_lines(event)]))


class JsonPrinter:
    """One JSON object a line."""

    def show(self, event: ChatEvent) -> None:
        """Take the next event."""
        if isinstance(event, TextEvent):
            say_json(event="text", text=event.text, token_ids=event.token_ids)
        elif isinstance(event, AudioEvent):
            say_json(event="audio", seq=event.seq, samples=event.sample_count)
        else:
            say_json(event="done", **msgspec.to_builtins(event))


class Recorder:
    """Keeps what has come of an answer.

    Attributes:
        text: The text so far.
    """

    def __init__(self) -> None:
        self.text = ""
        self._pieces: list[bytes] = []

    @property
    def waveform(self) -> bytes:
        """The speech so far, as in :class:`AudioEvent`."""
        return b"".join(self._pieces)

    def show(self, event: ChatEvent) -> None:
        """Take the next event."""
        if isinstance(event, TextEvent):
            self.text += event.text
        elif isinstance(event, AudioEvent):
            self._pieces.append(event.pcm)


class WavWriter(Recorder):
    """Writes the speech of an answer to a file when it is complete.

    Args:
        path: The file.
    """

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


async def stream(target: Target, request: GenerateRequest, listeners: Iterable[Listener]) -> None:
    """Send a request on a connection of its own, and hand on its answer.

    Cancelling it hangs up, which makes the gateway cancel the request.

    Args:
        target: The gateway.
        request: What is sent.
        listeners: Each takes every event, in this order.

    Raises:
        OmniRelayError: The gateway cannot be reached, the request failed, or a listener cannot go on.
    """
    async with target.client() as client:
        answer = client.chat(request)
        with ProgressLine(lambda: _describe(answer.upload), PATIENCE_S):
            async for event in answer:
                for listener in listeners:
                    listener.show(event)


def _describe(upload: UploadProgress) -> str:
    """How much of a large request is sent; nothing once it is, since the answer may come then."""
    if upload.total_bytes < LARGE_BYTES or upload.sent_bytes == upload.total_bytes:
        return ""
    return f"sending {mebibytes(upload.sent_bytes)} of {mebibytes(upload.total_bytes)}"
