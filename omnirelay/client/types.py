"""What a client gives and gets."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from omnirelay import events
from omnirelay.client.media import AudioSource, ImageSource, VideoSource, content
from omnirelay.client.wav import SAMPLE_BYTES, write_wav
from omnirelay.content import ChatMessage
from omnirelay.events import TextEvent
from omnirelay.protocol import GenerateRequest, SamplingOverrides

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Samples = npt.NDArray[np.float32]

DEFAULT_ADDRESS: Final = "tcp://127.0.0.1:5555"


class RequestOptions(TypedDict, total=False):
    """Fields of :class:`omnirelay.protocol.GenerateRequest` beside the prompt."""

    speech: bool
    speaker: str | None
    streaming: bool
    text_sampling: SamplingOverrides
    codec_sampling: SamplingOverrides
    seed: int | None
    priority: int
    deadline_s: float | None
    use_audio_in_video: bool
    traceparent: str | None


class ChatOptions(RequestOptions, total=False):
    """What may be said of a request beside the prompt.

    ``system`` is the text of a system message before the prompt.  ``audio``, ``images`` and ``videos`` are
    sounds, pictures and videos, each one source or several (see :mod:`omnirelay.client.media`); they stand
    in this order before the text of the user, in the same message.
    """

    system: str | None
    audio: AudioSource | Sequence[AudioSource]
    images: ImageSource | Sequence[ImageSource]
    videos: VideoSource | Sequence[VideoSource]


Prompt = str | Sequence[ChatMessage] | GenerateRequest
"""Text of the user, a conversation, or a whole request (then without options)."""


def build_request(
    prompt: Prompt,
    system: str | None = None,
    audio: AudioSource | Sequence[AudioSource] = (),
    images: ImageSource | Sequence[ImageSource] = (),
    videos: VideoSource | Sequence[VideoSource] = (),
    **options: Unpack[RequestOptions],
) -> GenerateRequest:
    """Give the request for a prompt; reads the files that it names.

    Raises:
        MediaError: A sound, picture or video cannot be read.
        TypeError: A whole request was given, and options too; or a conversation, and media besides.
    """
    media = any(not isinstance(each, list | tuple) or each for each in (audio, images, videos))
    if isinstance(prompt, GenerateRequest):
        if options or media or system is not None:
            raise TypeError("a GenerateRequest carries its options itself")
        return prompt
    if isinstance(prompt, str):
        messages = [ChatMessage("user", content(prompt, audio, images, videos))]
    elif media:
        raise TypeError("a conversation carries its sounds, pictures and videos in its messages")
    else:
        messages = list(prompt)
    if system is not None:
        messages.insert(0, ChatMessage("system", system))
    return GenerateRequest(messages=messages, **options)


@dataclass(frozen=True)
class AudioEvent:
    """The next piece of the waveform.

    Attributes:
        seq: 0, 1, 2, …
        waveform: float32, little-endian, in [-1, 1], mono, :data:`omnirelay.values.SAMPLE_RATE` a second.
    """

    seq: int
    waveform: bytes

    @property
    def sample_count(self) -> int:
        """How many samples there are."""
        return len(self.waveform) // SAMPLE_BYTES

    @property
    def samples(self) -> "Samples":
        """The samples as an array, float32 [n]; needs NumPy."""
        return samples_of(self.waveform)


class DoneEvent(events.DoneEvent, frozen=True, kw_only=True, tag=False):
    """The answer is complete: what the gateway tells, and times that the client measured.

    Attributes:
        ttft_s: Seconds from sending the request to the first text token.
        ttfa_s: Seconds to the first audio; none without.
        wall_s: Seconds to the end.
    """

    ttft_s: float | None
    ttfa_s: float | None
    wall_s: float


ChatEvent = TextEvent | AudioEvent | DoneEvent


@dataclass(frozen=True)
class ChatResult:
    """A whole answer.

    Attributes:
        text: The text.
        waveform: The speech, as in :class:`AudioEvent`; empty without speech.
        done: Everything else.
    """

    text: str
    waveform: bytes
    done: DoneEvent

    @property
    def audio(self) -> "Samples":
        """The speech as an array, float32 [n]; needs NumPy."""
        return samples_of(self.waveform)

    def save(self, path: str | Path) -> None:
        """Write the speech as a WAV file: 24 kHz, mono, 16 bits.

        Raises:
            OutputError: It cannot be written.
        """
        write_wav(Path(path), self.waveform)


def collect(events: Iterable[ChatEvent]) -> ChatResult:
    """Put the events of a complete answer together."""
    pieces: list[bytes] = []
    done: DoneEvent | None = None
    for event in events:
        if isinstance(event, AudioEvent):
            pieces.append(event.waveform)
        elif isinstance(event, DoneEvent):
            done = event
    if done is None:
        raise ValueError("the answer has no end: its last event was taken elsewhere")
    return ChatResult(done.text, b"".join(pieces), done)


def samples_of(waveform: bytes) -> "Samples":
    """Give a waveform as an array, float32 [n]; needs NumPy, which a client does without otherwise."""
    import numpy as np  # noqa: PLC0415

    return np.frombuffer(waveform, "<f4").astype(np.float32, copy=False)
