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

from omnirelay.client import (
    Answer,
    AsyncAnswer,
    AsyncClient,
    AudioEvent,
    AudioPart,
    ChatEvent,
    ChatMessage,
    ChatOptions,
    ChatResult,
    Client,
    DoneEvent,
    GenerateRequest,
    ImagePart,
    SamplingOverrides,
    StatusReport,
    TextEvent,
    TextPart,
    VideoPart,
    audio,
    image,
    video,
)

__all__ = [
    "Answer",
    "AsyncAnswer",
    "AsyncClient",
    "AudioEvent",
    "AudioPart",
    "ChatEvent",
    "ChatMessage",
    "ChatOptions",
    "ChatResult",
    "Client",
    "DoneEvent",
    "GenerateRequest",
    "ImagePart",
    "SamplingOverrides",
    "StatusReport",
    "TextEvent",
    "TextPart",
    "VideoPart",
    "audio",
    "image",
    "video",
]
