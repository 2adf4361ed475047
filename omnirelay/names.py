"""The public names of :mod:`omnirelay`."""

from omnirelay.client.aio import AsyncClient
from omnirelay.client.answer import AsyncAnswer
from omnirelay.client.media import audio, image, video
from omnirelay.client.request import build_request
from omnirelay.client.sync import Answer, Client
from omnirelay.client.types import ChatEvent, ChatResult, TimedDoneEvent
from omnirelay.content import AudioPart, ChatMessage, ImagePart, TextPart, VideoPart
from omnirelay.events import AudioEvent, DoneEvent, TextEvent
from omnirelay.protocol import GenerateRequest, SamplingOverrides
from omnirelay.status import StatusReport
from omnirelay.tools import Call, tool_result

__all__ = [
    "Answer",
    "AsyncAnswer",
    "AsyncClient",
    "AudioEvent",
    "AudioPart",
    "Call",
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
    "tool_result",
    "video",
]
