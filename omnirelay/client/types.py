"""What a client receives."""

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from omnirelay.client.wav import wav_bytes, write_wav
from omnirelay.events import AudioEvent, DoneEvent, TextEvent, samples_of
from omnirelay.tools import Call

if TYPE_CHECKING:
    from omnirelay.events import Samples

DEFAULT_ADDRESS: Final = "tcp://127.0.0.1:5555"


class TimedDoneEvent(DoneEvent, frozen=True, kw_only=True, tag=False):
    """The end of an answer, with the client's measurements.

    Attributes:
        ttft_s: Seconds from sending the request to the first text token.
        ttfa_s: Seconds to the first audio; None without audio.
        wall_s: Seconds to the end.
    """

    ttft_s: float | None
    ttfa_s: float | None
    wall_s: float


ChatEvent = TextEvent | AudioEvent | TimedDoneEvent


@dataclass(frozen=True)
class ChatResult:
    """A whole answer.

    Attributes:
        text: The text.
        waveform: The speech as PCM, as in :class:`omnirelay.AudioEvent`; empty without speech.
        done: Everything else; of a text that was read in pieces, that of the last one.
    """

    text: str
    waveform: bytes
    done: TimedDoneEvent

    def __repr__(self) -> str:
        """One line, without the samples and tokens."""
        return f"{type(self).__name__}(text={self.text!r}, audio_seconds={self.done.audio_seconds:.2f})"

    def _repr_html_(self) -> str:
        """In a notebook: a player, and the text."""
        player = ""
        if self.waveform:
            sound = base64.b64encode(wav_bytes(self.waveform)).decode()
            player = f'<audio controls src="data:audio/wav;base64,{sound}"></audio>'
        return f"{player}<p>{html.escape(self.text)}</p>"

    @property
    def calls(self) -> Sequence[Call]:
        """Calls of functions, in their order."""
        return self.done.calls

    @property
    def audio(self) -> "Samples":
        """The speech as an array, float32 [n]; needs NumPy."""
        return samples_of(self.waveform)

    def save(self, path: str | Path) -> None:
        """Write the speech as a WAV file: 24 kHz, mono, 16 bits.

        Raises:
            OutputError: The file cannot be written.
        """
        write_wav(Path(path), self.waveform)


def collect(events: Iterable[ChatEvent]) -> ChatResult:
    """Join the events of a complete answer, or of the pieces of a text that was read."""
    pieces: list[bytes] = []
    texts: list[str] = []
    done: TimedDoneEvent | None = None
    for event in events:
        if isinstance(event, AudioEvent):
            pieces.append(event.pcm)
        elif isinstance(event, TimedDoneEvent):
            done = event
            texts.append(event.text)
    if done is None:
        raise ValueError("the answer has no last event: it was iterated elsewhere before")
    return ChatResult(" ".join(texts), b"".join(pieces), done)
