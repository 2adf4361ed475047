"""A user who speaks and hears in real time, whatever client stands between; needs no package."""

import argparse
import asyncio
import json
import socket
import time
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
QUIET = 0.02
"""Of a recording's peak: what is lower at its ends is no speech."""


class User:
    """Asks questions, every second of them while the answer before it is heard.

    Args:
        questions: Samples of 16 bits at 24 kHz, mono.

    Attributes:
        first_audio_s: From the last sample of each question to the first sample of its answer.
        stopped_s: From the first sample of each interrupting question to the last that was heard of the
            answer; answers that ended by themselves are left out.
        stopped: How many answers were stopped.
        said: The texts of answers; the client adds them.
    """

    def __init__(self, questions: Sequence[bytes]) -> None:
        self.questions = questions
        self.first_audio_s: list[float] = []
        self.stopped_s: list[float] = []
        self.stopped = 0
        self.said: list[str] = []
        self._speech = b""
        self._silent = asyncio.Event()
        self._answered = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._first_audio = self._heard_until = self._spoken = 0.0
        self._stopped = False

    async def microphone(self) -> AsyncIterator[bytes]:
        """Give pieces of speech and silence without end, each when its last sample is spoken."""
        begun = time.monotonic()
        for number in count(1):
            await asyncio.sleep(begun + number * PIECE_S - time.monotonic())
            piece, self._speech = self._speech[:PIECE_BYTES], self._speech[PIECE_BYTES:]
            if piece and not self._speech:
                self._spoken = time.monotonic()
                self._answered.clear()
                self._silent.set()
            yield piece or bytes(PIECE_BYTES)

    def hear(self, seconds: float) -> None:
        """Take speech, which is played behind what was taken before."""
        now = time.monotonic()
        if not self._answered.is_set():
            self._first_audio = now
            self._answered.set()
        self._ended.clear()
        self._heard_until = max(now, self._heard_until) + seconds

    def stop(self) -> None:
        """Play nothing of what was taken so far."""
        self.stopped += self.hearing
        self._stopped = self._stopped or self.left_s > 0
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
                self.first_audio_s.append(self._first_audio - self._spoken)
                if number % 2 == 0 and number + 1 < len(self.questions):
                    await asyncio.sleep(HEARD_S)
                    continue
                await self._ended.wait()
            await asyncio.sleep(self.left_s + BETWEEN_S)

    async def _say(self, question: bytes) -> None:
        interrupts = self.hearing
        # The last sample of a question is the last of a piece.
        padded = bytes(-len(question) % PIECE_BYTES) + question
        self._silent.clear()
        self._stopped = False
        self._answered.set()
        self._speech = padded
        await self._silent.wait()
        if interrupts:
            begun = self._spoken - len(question) / 2 / RATE
            if self._stopped:
                self.stopped_s.append(min(self._heard_until, self._spoken) - begun)


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
    """Let users ask the questions of the command line, all at once, and print what they heard, as JSON.

    Args:
        talk: Connects a user by a client, and lets it converse.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=1, metavar="N")
    parser.add_argument("questions", nargs="+", metavar="QUESTION.wav")
    options = parser.parse_args()
    questions = [question(path) for path in options.questions]
    each = len(questions) // options.sessions
    users = [User(questions[number * each : (number + 1) * each]) for number in range(options.sessions)]

    async def converse() -> None:
        await asyncio.gather(*(talk(user) for user in users))

    asyncio.run(converse())
    print(
        json.dumps(
            {
                "first_audio_s": [value for user in users for value in user.first_audio_s],
                "stopped_s": [value for user in users for value in user.stopped_s],
                "stopped": sum(user.stopped for user in users),
                "said": [user.said for user in users],
            }
        )
    )
