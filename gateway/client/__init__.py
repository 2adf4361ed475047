"""The client library: :class:`GatewayClient` for plain code, :class:`AsyncGatewayClient` for asyncio.

Example::

    with GatewayClient("tcp://127.0.0.1:5555") as client:
        for event in client.chat("Hello", speaker="Chelsie"):
            if isinstance(event, TextEvent):
                print(event.text, end="", flush=True)
"""

from gateway.client.aio import AsyncAnswer, AsyncGatewayClient
from gateway.client.sync import Answer, GatewayClient
from gateway.client.types import AudioEvent, ChatEvent, ChatOptions, ChatResult, DoneEvent
from gateway.events import TextEvent
from gateway.protocol import ChatMessage, GenerateRequest, SamplingOverrides, TextPart
from gateway.status import StatusReport

__all__ = [
    "Answer",
    "AsyncAnswer",
    "AsyncGatewayClient",
    "AudioEvent",
    "ChatEvent",
    "ChatMessage",
    "ChatOptions",
    "ChatResult",
    "DoneEvent",
    "GatewayClient",
    "GenerateRequest",
    "SamplingOverrides",
    "StatusReport",
    "TextEvent",
    "TextPart",
]
