"""Realtime sessions by OpenAI's own client: what a test says, and waits for."""

import base64
import io
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection

from omnirelay.content import MediaPart
from shared.messages import MediaItem, ThinkRequest
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import MODEL, HttpBench, cut, melody

SAID = melody(1.2)
CHUNKS = cut(SAID, [5760, 11520])
ANSWER = "How are you? 😀"
TONE = (np.sin(np.arange(12_000) / 20) * 8000).astype("<i2").tobytes()
PUSH_TO_TALK: Any = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
HELLO: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
PIECE = 4800
"""100 ms of 24 kHz, as clients send."""


@asynccontextmanager
async def talking(b: HttpBench, **how: Any) -> AsyncIterator[Connection]:
    """A session whose client says itself when the user has finished."""
    async with b.ai.realtime.connect(model=MODEL, **how) as connection:
        created = await receive(connection)
        assert created.type == "session.created"
        assert created.session.audio.input.turn_detection.type == "server_vad"
        await update(connection, **PUSH_TO_TALK)
        yield connection


async def receive(c: Connection) -> Any:
    """One event, which has to be valid for the client's model of its type, and an id."""
    event: Any = await c.recv()
    assert type(event).__name__ != "BaseModel"
    assert event.event_id
    type(event).model_validate(event.to_dict(), strict=True)
    return event


async def take(c: Connection, last: str) -> list[Any]:
    """The events up to the first of this type."""
    events: list[Any] = []
    while not events or events[-1].type != last:
        events.append(await receive(c))
    return events


async def say(c: Connection, **event: Any) -> None:
    """Send an event that the client's own methods might not make."""
    await c.send(cast("Any", event))


async def error_of(c: Connection) -> Any:
    return (await take(c, "error"))[-1].error


async def update(c: Connection, **session: Any) -> Any:
    """Change settings; gives the event that shows them."""
    await say(c, type="session.update", session=session)
    return (await take(c, "session.updated"))[-1]


async def settle(c: Connection) -> None:
    """All events before have been handled."""
    await update(c)


async def detect(c: Connection, turns: dict[str, Any] | None) -> Any:
    return await update(c, audio={"input": {"turn_detection": turns}})


async def append(c: Connection, pcm: bytes, piece: int = PIECE) -> None:
    for at in range(0, len(pcm), piece):
        await c.input_audio_buffer.append(audio=base64.b64encode(pcm[at : at + piece]).decode())


async def commit(c: Connection, pcm: bytes = b"") -> str:
    """Commit what was appended, and this; gives the id of the item."""
    await append(c, pcm)
    await c.input_audio_buffer.commit()
    return await added(c)


async def added(c: Connection) -> str:
    """The id of the next item."""
    item_id: str = (await take(c, "conversation.item.done"))[-1].item.id
    return item_id


async def add(c: Connection, item: Any = HELLO) -> str:
    await c.conversation.item.create(item=item)
    return await added(c)


async def ask(c: Connection, **response: Any) -> list[Any]:
    await c.response.create(response=response or None)  # type: ignore[arg-type]
    return await take(c, "response.done")


async def begin(b: HttpBench, c: Connection) -> ThinkRequest:
    """Ask something that no stage has answered yet."""
    index = len(b.stages.requests)
    await add(c)
    await c.response.create()
    return await b.stages.request(index)


async def clear(c: Connection) -> None:
    await c.input_audio_buffer.clear()
    await take(c, "input_audio_buffer.cleared")


async def truncate(c: Connection, item_id: str, ms: int) -> None:
    await c.conversation.item.truncate(item_id=item_id, content_index=0, audio_end_ms=ms)
    await take(c, "conversation.item.truncated")


async def retrieve(c: Connection, item_id: str) -> Any:
    await c.conversation.item.retrieve(item_id=item_id)
    return (await take(c, "conversation.item.retrieved"))[-1].item


def of_type(events: list[Any], kind: str) -> list[Any]:
    return [event for event in events if event.type == kind]


def recording(item: MediaItem | MediaPart) -> bytes:
    """The samples of a sound."""
    data = item.data.view if isinstance(item, MediaItem) else item.data
    assert data is not None
    with wave.open(io.BytesIO(bytes(data))) as file:
        assert file.getparams()[:3] == (1, 2, 24_000)
        return file.readframes(file.getnframes())


def picture(image: str = "aGk=") -> Any:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{image}"}


async def idle(b: HttpBench) -> None:
    """Nothing is held for anybody any more."""
    await until(lambda: not b.process.gateway._active and b.process.gateway.held.total == 0, "nothing held")
