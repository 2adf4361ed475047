"""The client library; :mod:`omnirelay` has its public names."""

from omnirelay.client.aio import AsyncAnswer, AsyncClient
from omnirelay.client.media import audio, image, video
from omnirelay.client.sync import Answer, Client
from omnirelay.client.types import AudioEvent, ChatEvent, ChatOptions, ChatResult, DoneEvent
from omnirelay.content import AudioPart, ChatMessage, ImagePart, TextPart, VideoPart
from omnirelay.events import TextEvent
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
