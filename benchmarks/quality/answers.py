"""Held-out questions as requests, and what a running stack says to them, and how it sounds."""

import asyncio
import random
import zlib
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from labs.training.data.augmentation import RATE
from labs.training.data.corpus import VOICES
from labs.training.data.dialogues import Turn
from labs.training.data.questions import Question, all_questions
from labs.training.data.synthesis import Speak, synthesize
from omnirelay import (
    AsyncClient,
    ChatMessage,
    GenerateRequest,
    SamplingOverrides,
    TextPart,
    audio,
    build_request,
    image,
)
from omnirelay.client.types import ChatEvent, collect
from omnirelay.content import ContentPart

_SPOKEN = ("text", "images", "speech, trained", "typed", "reading")
"""How the kinds begin whose replies are spoken: hearing is measured by what is written."""


@dataclass(frozen=True, eq=False)
class Asked:
    """One request.

    Attributes:
        kind: Which row of the table it belongs to.
        messages: The conversation.
        reply: The right answer.
        speaker: Who is to say it.
    """

    kind: str
    messages: list[ChatMessage]
    reply: str
    speaker: str

    @property
    def is_spoken(self) -> bool:
        """The reply is spoken; of the other kinds only the text is asked for."""
        return self.kind.startswith(_SPOKEN)

    @property
    def is_read(self) -> bool:
        """The reply is given, to be spoken."""
        return self.kind.startswith("reading")

    @property
    def is_in_any_order(self) -> bool:
        """The reply is no sentence."""
        return self.kind.endswith("any words")

    @property
    def is_long(self) -> bool:
        """A long conversation goes before, longer than any that speech was trained on."""
        return self.kind.endswith("turns")

    @property
    def seed(self) -> int:
        """A seed of its own, the same in each run."""
        return zlib.crc32(f"{self.kind}/{self.speaker}/{self.reply}".encode())


def held_out_requests(count: int, speak: Speak = synthesize) -> list[Asked]:
    """Return the requests of every kind, at most ``count`` of each; the voices take turns."""
    speakers = list(VOICES)
    return [
        Asked(kind, _messages(question, speak), question.reply, speakers[number % len(speakers)])
        for kind, questions in all_questions(count).items()
        for number, question in enumerate(questions)
    ]


def _messages(question: Question, speak: Speak) -> list[ChatMessage]:
    messages = []
    generator = random.Random(zlib.crc32(question.reply.encode()))  # noqa: S311  (drawings)
    for turn in question.dialogue.turns:
        messages.append(ChatMessage("user", _content(turn, question, generator, speak)))
        messages.append(ChatMessage("assistant", turn.reply))
    return messages[:-1]


def _content(turn: Turn, question: Question, generator: random.Random, speak: Speak) -> list[ContentPart]:
    parts: list[ContentPart] = []
    if turn.scene is not None:
        parts.append(image(turn.scene.draw(generator)))
    spoken = question.wave(speak) if turn.spoken else None
    parts.append(TextPart(turn.question) if spoken is None else audio(spoken, RATE))
    return parts


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
        speech=asked.is_spoken,
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
