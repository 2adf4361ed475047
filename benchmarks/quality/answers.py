"""Asks a running stack, and keeps what it says and how it sounds."""

import asyncio
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.quality.requests import Asked
from omnirelay import AsyncClient, GenerateRequest, SamplingOverrides, build_request
from omnirelay.client.types import ChatEvent, collect

MOST_WORDS = 32
MOST_CODES = 500
"""Ten seconds: more than the longest right answer, and an end for one that does not stop."""

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SpokenReply:
    """What came of a request.

    Attributes:
        asked: The request.
        text: What was written.
        samples: What was said.
        ended: The speech ended by itself.
    """

    asked: Asked
    text: str
    samples: Samples
    ended: bool

    @property
    def right(self) -> bool:
        """It is the right answer, word for word."""
        return self.text == self.asked.reply


async def ask_all(
    address: str, requests: Sequence[Asked], clients: int, *, streaming: bool = True
) -> list[SpokenReply]:
    """Ask everything, ``clients`` requests at once; the replies are in the order of the requests.

    Raises:
        OmniRelayError: A request failed.
    """
    free = asyncio.Semaphore(clients)
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:

        async def one(asked: Asked) -> SpokenReply:
            async with free:
                return await collected(asked, client.chat(request(asked, streaming=streaming)))

        replies = [group.create_task(one(asked)) for asked in requests]
    return [reply.result() for reply in replies]


def request(asked: Asked, *, streaming: bool = True) -> GenerateRequest:
    """Return a question as the client sends it."""
    return build_request(
        "" if asked.is_read else asked.messages,
        say=asked.reply if asked.is_read else None,
        speaker=asked.speaker,
        seed=asked.seed,
        streaming=streaming,
        text_sampling=SamplingOverrides(max_tokens=MOST_WORDS),
        codec_sampling=SamplingOverrides(max_tokens=MOST_CODES),
    )


async def collected(asked: Asked, events: AsyncIterable[ChatEvent]) -> SpokenReply:
    """Return what came of a request.

    Raises:
        OmniRelayError: It failed.
    """
    reply = collect([event async for event in events])
    return SpokenReply(asked, reply.text.strip(), reply.audio, reply.done.codec_finish_reason == "stop")
