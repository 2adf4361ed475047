"""What a gateway writes to a client, whole and cut: the client is told the same, and never left waiting."""

import asyncio
from typing import Final
from unittest import mock

import msgspec
import numpy as np

from omnirelay import AsyncClient, AudioEvent
from omnirelay.client.answer import AsyncAnswer
from omnirelay.errors import OmniRelayError
from omnirelay.protocol import LENGTH_BYTES
from tests.fuzz.streams import connection, cut, feed, framed, settle

REQUESTS: Final = 2
"""Their names are 1 and 2; the status is asked for by the name 3."""
SECONDS: Final = ("ttft_s", "ttfa_s", "wall_s")


def check(data: bytes) -> None:
    """Listen to a gateway that says this, in two ways."""
    data = framed(data)
    end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
    greeting, rest = data[:end], data[end:]
    whole = asyncio.run(_listen([greeting], [rest]))
    assert whole == asyncio.run(_listen(cut(greeting), cut(rest)))


async def _listen(greeting: list[bytes], rest: list[bytes]) -> list[object]:
    """Give what the users of a client see; requests are sent between what greets them and the rest."""
    reader, writer, _ = connection()
    client = AsyncClient(reconnect_s=0)
    feeding = asyncio.create_task(feed(reader, greeting))
    try:
        with mock.patch("asyncio.open_connection", mock.AsyncMock(return_value=(reader, writer))):
            connecting = asyncio.create_task(client.connect())
            await feeding
            if not connecting.done():
                reader.feed_eof()
            async with asyncio.timeout(60):
                await connecting
        return await _ask(client, reader, rest)
    except OmniRelayError as error:
        return [error.code, str(error)]
    finally:
        await client.close()


async def _ask(client: AsyncClient, reader: asyncio.StreamReader, rest: list[bytes]) -> list[object]:
    answers = [client.chat("Hello") for _ in range(REQUESTS)]
    report = asyncio.create_task(client.status())
    await settle()
    await feed(reader, rest)
    reader.feed_eof()
    async with asyncio.timeout(60):
        seen: list[object] = [await _events(answer) for answer in answers]
        await asyncio.wait({report})
    error = report.exception()
    assert error is None or isinstance(error, OmniRelayError), error
    return [*seen, str(error) if error else report.result()]


async def _events(answer: AsyncAnswer) -> list[object]:
    seen: list[object] = []
    try:
        async for event in answer:
            if isinstance(event, AudioEvent):
                assert event.samples.dtype == np.float32
                seen.append((event.seq, event.samples.tobytes()))
            else:
                seen.append(repr({**msgspec.to_builtins(event), **dict.fromkeys(SECONDS)}))
    except OmniRelayError as error:
        seen += [error.code, str(error)]
    return seen
