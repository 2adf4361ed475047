"""What a client gives and gets."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from gateway import events
from gateway.client.media import AudioSource, ImageSource, VideoSource, content
from gateway.events import TextEvent
from gateway.parts import ChatMessage
from gateway.protocol import GenerateRequest, SamplingOverrides

DEFAULT_ADDRESS: Final = "tcp://127.0.0.1:5555"
Samples = npt.NDArray[np.float32]


class RequestOptions(TypedDict, total=False):
    """Fields of :class:`gateway.protocol.GenerateRequest` beside the prompt."""

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
    sounds, pictures and videos, each one source or several (see :mod:`gateway.client.media`); they stand
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
        samples: float32 in [-1, 1], mono, :data:`shared.messages.SAMPLE_RATE` a second.
    """

    seq: int
    samples: Samples


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
        audio: The waveform; empty without speech.
        done: Everything else.
    """

    text: str
    audio: Samples
    done: DoneEvent


def collect(events: Iterable[ChatEvent]) -> ChatResult:
    """Put the events of a complete answer together."""
    pieces: list[Samples] = []
    done: DoneEvent | None = None
    for event in events:
        if isinstance(event, AudioEvent):
            pieces.append(event.samples)
        elif isinstance(event, DoneEvent):
            done = event
    if done is None:
        raise ValueError("the answer has no end: its last event was taken elsewhere")
    audio = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    return ChatResult(done.text, audio, done)
