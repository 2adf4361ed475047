"""A user who speaks and hears in real time, whatever client stands between; needs no package."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
import wave
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count

RATE = 24_000
PIECE_S = 0.02
PIECE_BYTES = round(RATE * PIECE_S) * 2
CONNECTED_S = 1.0
"""Silence before the first question."""
HEARD_S = 0.2
"""Of an answer, before it is interrupted."""
BETWEEN_S = 1.0
"""From the end of an answer to a question that does not interrupt."""
ANSWER_S = 60.0
START_S = 180
QUIET = 0.02
"""Of a recording's peak: what is lower at its ends is no speech."""


class User:
    """Asks questions, every second of them while the answer before it is heard.

    Args:
        questions: Samples of 16 bits at 24 kHz, mono.

    Attributes:
        answered: How many questions were answered.
        stopped: How many answers were stopped.
        said: The texts of answers; the client adds them.
    """

    def __init__(self, questions: Sequence[bytes]) -> None:
        self.questions = questions
        self.answered = self.stopped = 0
        self.said: list[str] = []
        self._speech = b""
        self._silent = asyncio.Event()
        self._answered = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._heard_until = 0.0

    async def microphone(self) -> AsyncIterator[bytes]:
        """Give pieces of speech and silence without end, each when its last sample is spoken."""
        begun = time.monotonic()
        for number in count(1):
            await asyncio.sleep(begun + number * PIECE_S - time.monotonic())
            piece, self._speech = self._speech[:PIECE_BYTES], self._speech[PIECE_BYTES:]
            if piece and not self._speech:
                self._answered.clear()
                self._silent.set()
            yield piece or bytes(PIECE_BYTES)

    def hear(self, seconds: float) -> None:
        """Take speech, which is played behind what was taken before."""
        self._answered.set()
        self._ended.clear()
        self._heard_until = max(time.monotonic(), self._heard_until) + seconds

    def stop(self) -> None:
        """Play nothing of what was taken so far."""
        self.stopped += self.hearing
        self._heard_until = min(self._heard_until, time.monotonic())
        self._ended.set()

    def end(self) -> None:
        """Note that an answer has been taken whole."""
        self._ended.set()

    @property
    def left_s(self) -> float:
        """Seconds of speech taken and not yet played."""
        return max(0.0, self._heard_until - time.monotonic())

    @property
    def hearing(self) -> bool:
        """Whether an answer is played, or is to come."""
        return self.left_s > 0 or not self._ended.is_set()

    async def converse(self) -> None:
        """Ask all questions.

        Raises:
            TimeoutError: One was not answered.
        """
        await asyncio.sleep(CONNECTED_S)
        for number, question in enumerate(self.questions):
            await self._say(question)
            async with asyncio.timeout(ANSWER_S):
                await self._answered.wait()
                self.answered += 1
                if number % 2 == 0 and number + 1 < len(self.questions):
                    await asyncio.sleep(HEARD_S)
                    continue
                await self._ended.wait()
            await asyncio.sleep(self.left_s + BETWEEN_S)

    async def _say(self, question: bytes) -> None:
        # The last sample of a question is the last of a piece.
        self._silent.clear()
        self._answered.set()
        self._speech = bytes(-len(question) % PIECE_BYTES) + question
        await self._silent.wait()


async def first_of(*tasks: Awaitable[object]) -> None:
    """Wait for the first that ends, cancel the others, and raise what it raised."""
    running = [asyncio.ensure_future(each) for each in tasks]
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        task.cancel()
    for task in done:
        task.result()


def wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Wait until a program's own server answers."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()  # noqa: S310 - its own
            return
        time.sleep(0.2)
    raise RuntimeError(f"{url} does not answer")


def free_port() -> int:
    """Give a port of the loopback for a program's own server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def question(path: str) -> bytes:
    """Read a WAV file of 16 bits, mono, without the silence at both ends, at 24 kHz."""
    with wave.open(path) as file:
        rate = file.getframerate()
        samples = array("h", file.readframes(file.getnframes()))
    quiet = QUIET * max(samples)
    loud = [at for at, sample in enumerate(samples) if abs(sample) > quiet]
    speech = samples[loud[0] : loud[-1] + 1]
    taken = (at * rate / RATE for at in range(len(speech) * RATE // rate - 1))
    pairs = ((speech[int(at)], speech[min(int(at) + 1, len(speech) - 1)], at % 1) for at in taken)
    return array("h", (round(left + (right - left) * part) for left, right, part in pairs)).tobytes()


def main(talk: Callable[[User], Awaitable[None]]) -> None:
    """Let a user ask the questions of the command line, and print what became of them, as JSON.

    Args:
        talk: Connects a user by a client, and lets it converse.
    """
    user = User([question(path) for path in sys.argv[1:]])
    asyncio.run(talk(user))
    print(json.dumps({"answered": user.answered, "stopped": user.stopped, "said": user.said}))
