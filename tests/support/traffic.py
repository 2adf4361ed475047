"""Requests of all kinds to a running stack, in threads."""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, Self

from omnirelay import AudioEvent, ChatMessage, Client, SamplingOverrides
from omnirelay.errors import BusyError, InvalidRequestError
from tests.support.media import clip, picture, spoken

STOP_S = 60.0
# Longer than a block of the KV cache, so that the prefix cache finds it again.
RULES: Final = "Answer in one sentence. Be polite, be short, and say when you do not know. " * 20

Ask = Callable[[Client, int], None]
"""Sends a request of its kind, with a number that makes it differ from others."""


def everything(client: Client, number: int) -> None:
    """Short speech about a new picture, the same sound and the same video."""
    client.chat(
        "What is this?",
        images=picture("png", number),
        audio=spoken(),
        videos=clip(),
        seed=number,
        text_sampling=_text(12),
        codec_sampling=_codec(40),
    ).result()


def conversation(client: Client, number: int) -> None:
    """Two turns, in text alone."""
    turns = [ChatMessage("system", RULES), ChatMessage("user", f"What is {number} plus one?")]
    for _ in range(2):
        answer = client.chat(turns, speech=False, seed=number, text_sampling=_text(30)).result()
        turns += [ChatMessage("assistant", answer.text), ChatMessage("user", "And one more?")]


def question(client: Client, number: int) -> None:
    """A spoken question that is asked again now and then, and an answer of a few seconds."""
    sound = spoken("ogg", f"How much is {number % 5} and {number % 3}?")
    client.chat(audio=sound, seed=number, text_sampling=_text(40), codec_sampling=_codec(150)).result()


def look(client: Client, number: int) -> None:
    """A large picture that nobody has seen."""
    client.chat(
        "What is this?",
        images=picture("jpeg", number, 1600, 1200),
        seed=number,
        text_sampling=_text(30),
        codec_sampling=_codec(100),
    ).result()


def watch(client: Client, number: int) -> None:
    """One of three videos, in text alone."""
    video = clip("mp4", 3.0, seed=number % 3)
    client.chat("What happens?", videos=video, speech=False, text_sampling=_text(20)).result()


def leave(client: Client, number: int) -> None:
    """Interrupts the answer when it begins to be heard."""
    answer = client.chat("Tell me all.", seed=number, text_sampling=_text(60), codec_sampling=_codec(300))
    for event in answer:
        if isinstance(event, AudioEvent):
            answer.cancel()
            return


def err(client: Client, number: int) -> None:
    """Sends what is no picture."""
    with suppress(InvalidRequestError):
        client.chat("What is this?", images=picture("png", number)[:200]).result()


MIXED: Final[Sequence[Ask]] = (
    question, conversation, look, question, everything, watch, question, leave, conversation, look, err,
)  # fmt: skip


class Clients:
    """Threads that ask until they are stopped."""

    stop_s = STOP_S

    def __init__(self, threads: Iterable[threading.Thread]) -> None:
        self._stopping = threading.Event()
        self._threads = list(threads)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(self.stop_s)


class Traffic(Clients):
    """Clients that ask, each one request after the other, until they are stopped.

    Args:
        address: The gateway's.
        asks: What a client asks in turn; each client begins at another one.
        clients: How many there are.
        after_s: When each comes, later than the one before.
        until_s: When the first one goes; each goes earlier than the one before, by ``after_s``.
        keys: API keys of the clients, in turn.  Who is busy with a limit of his key waits.
    """

    def __init__(
        self,
        address: str,
        asks: Sequence[Ask] = (everything,),
        *,
        clients: int = 1,
        after_s: float = 0.0,
        until_s: float = math.inf,
        keys: Sequence[str | None] = (None,),
    ) -> None:
        self._keys = keys
        self._address = address
        self._asks = asks
        super().__init__(
            threading.Thread(target=self._run, args=(first, after_s * first, until_s - after_s * first))
            for first in range(clients)
        )

    def _run(self, first: int, after_s: float, until_s: float) -> None:
        began = time.monotonic()
        if self._stopping.wait(after_s):
            return
        with Client(self._address, self._keys[first % len(self._keys)]) as client:
            for number in itertools.count(first, len(self._threads)):
                if self._stopping.is_set() or time.monotonic() > began + until_s:
                    return
                turn = first + number // len(self._threads)
                try:
                    self._asks[turn % len(self._asks)](client, number)
                except BusyError as error:
                    self._stopping.wait((error.retry_after_ms or 1000) / 1000)


def _text(tokens: int) -> SamplingOverrides:
    return SamplingOverrides(max_tokens=tokens, min_tokens=tokens // 2)


def _codec(tokens: int) -> SamplingOverrides:
    return SamplingOverrides(max_tokens=tokens, min_tokens=tokens // 2)
