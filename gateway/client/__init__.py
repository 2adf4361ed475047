"""The client library: :class:`GatewayClient` for plain code, :class:`AsyncGatewayClient` for asyncio.

Example::

    with GatewayClient("tcp://127.0.0.1:5555") as client:
        for event in client.chat("Hello", speaker="Chelsie"):
            if isinstance(event, TextEvent):
                print(event.text, end="", flush=True)

Sounds, pictures and videos go with the text, ``client.chat("What is this?", images="cat.jpg")``, or as
parts into the messages of a conversation: :func:`audio`, :func:`image`, :func:`video`.
"""

from gateway.client.aio import AsyncAnswer, AsyncGatewayClient
from gateway.client.media import audio, image, video
from gateway.client.sync import Answer, GatewayClient
from gateway.client.types import AudioEvent, ChatEvent, ChatOptions, ChatResult, DoneEvent
from gateway.events import TextEvent
from gateway.parts import AudioPart, ChatMessage, ImagePart, TextPart, VideoPart
from gateway.protocol import GenerateRequest, SamplingOverrides
from gateway.status import StatusReport

__all__ = [
    "Answer",
    "AsyncAnswer",
    "AsyncGatewayClient",
    "AudioEvent",
    "AudioPart",
    "ChatEvent",
    "ChatMessage",
    "ChatOptions",
    "ChatResult",
    "DoneEvent",
    "GatewayClient",
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
