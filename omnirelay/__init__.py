"""Client of an OmniRelay server: :class:`Client` for plain code, :class:`AsyncClient` for asyncio.

Example::

    from omnirelay import AudioEvent, Client, TextEvent

    with Client("tcp://127.0.0.1:5555") as client:
        for event in client.chat("Hello", speaker="Chelsie"):
            if isinstance(event, TextEvent):
                print(event.text, end="", flush=True)

Audio, images and videos go with the text, ``client.chat("What is this?", images="cat.jpg")``, or as parts
into the messages of a conversation: :func:`audio`, :func:`image`, :func:`video`.  Errors are classes of
:mod:`omnirelay.errors`.

This package imports nothing else of the project: it is all that a client's machine needs.
"""

from omnirelay.client.aio import AsyncAnswer, AsyncClient
from omnirelay.client.media import audio, image, video
from omnirelay.client.request import build_request
from omnirelay.client.sync import Answer, Client
from omnirelay.client.types import ChatEvent, ChatResult, TimedDoneEvent
from omnirelay.content import AudioPart, ChatMessage, ImagePart, TextPart, VideoPart
from omnirelay.events import AudioEvent, DoneEvent, TextEvent
from omnirelay.protocol import GenerateRequest, SamplingOverrides
from omnirelay.status import StatusReport

__all__ = [
    "Answer",
    "AsyncAnswer",
    "AsyncClient",
    "AudioEvent",
    "AudioPart",
    "ChatEvent",
    "ChatMessage",
    "ChatResult",
    "Client",
    "DoneEvent",
    "GenerateRequest",
    "ImagePart",
    "SamplingOverrides",
    "StatusReport",
    "TextEvent",
    "TextPart",
    "TimedDoneEvent",
    "VideoPart",
    "audio",
    "build_request",
    "image",
    "video",
]
