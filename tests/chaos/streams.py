"""The requests, what their clients hear, and how that differs from what they should."""

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from omnirelay import AudioEvent, Client, GenerateRequest, SamplingOverrides, TextEvent
from omnirelay.errors import BusyError, OmniRelayError, StageUnavailableError
from omnirelay.events import DoneEvent

TEXT_TOKENS: Final = 32
CODEC_TOKENS: Final = 128
CHUNK_FRAMES: Final = [12, 24, 48]
"""How streamed speech is cut; chunks that are cut to come in time have other samples."""
COME_AGAIN_S: Final = 120.0
"""How long a client that is turned away asks again."""

Chunk = npt.NDArray[np.float32]


@dataclass
class Heard:
    """What a client got.

    Attributes:
        text: Text ids, as the end of the answer tells them.
        told: Text ids, as they came.
        codes: Codec ids.
        seqs: Numbers of the chunks.
        chunks: Their samples.
        at: When each event came, in monotonic seconds.
        first_audio: When speech came first.
        seed: As the end of the answer tells it.
        ended: The answer is whole.
        error: Why there is no whole answer.
    """

    text: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    first_audio: float | None = None
    seed: int | None = None
    ended: bool = False
    error: OmniRelayError | None = None

    def take(self, event: TextEvent | AudioEvent | DoneEvent) -> None:
        """Note an event."""
        self.at.append(time.monotonic())
        if isinstance(event, TextEvent):
            self.told += event.token_ids
        elif isinstance(event, AudioEvent):
            self.first_audio = self.first_audio or self.at[-1]
            self.seqs.append(event.seq)
            self.chunks.append(event.samples)
        elif isinstance(event, DoneEvent):
            self.text, self.codes = event.text_token_ids, event.codec_token_ids
            self.seed = event.seed
            self.ended = True

    def differences(self, undisturbed: "Heard") -> list[str]:
        """What is not as in the undisturbed run."""
        if self.error is not None:
            return [f"{self.error.code}: {self.error}"]
        wrong = {
            "the text ids differ": self.text != undisturbed.text,
            "the text that came is not that of the end": self.told != self.text,
            "the codec ids differ": self.codes != undisturbed.codes,
            f"there are {len(self.chunks)} chunks": len(self.chunks) != len(undisturbed.chunks),
        }
        return [what for what, is_so in wrong.items() if is_so] or self.departures(undisturbed)

    def departures(self, undisturbed: "Heard") -> list[str]:
        """What of a part of an answer is not as in the undisturbed run."""
        sizes, others = ([chunk.size for chunk in each.chunks] for each in (self, undisturbed))
        wrong = {
            "the text ids differ": self.told != undisturbed.told[: len(self.told)],
            "the chunks are not numbered one after another": self.seqs != list(range(len(self.seqs))),
            f"the chunks have {sizes} samples instead of {others}": sizes != others[: len(sizes)],
        }
        found = [what for what, is_so in wrong.items() if is_so]
        return found or _other_samples(self.chunks, undisturbed.chunks)

    def silence_after(self, moment: float) -> float:
        """How long after a moment the longest silence behind it ended, in seconds."""
        times = [moment, *(each for each in self.at if each > moment)]
        gaps = [(after - before, after) for before, after in itertools.pairwise(times)]
        return max(gaps)[1] - moment if gaps else 0.0


def _other_samples(chunks: list[Chunk], others: list[Chunk]) -> list[str]:
    """The chunks that differ in any bit, of as many as there are."""
    return [
        f"chunk {number} differs by up to {np.abs(chunk - other).max():.2g}"
        for number, (chunk, other) in enumerate(zip(chunks, others, strict=False))
        if not np.array_equal(chunk, other)
    ]


def draws(tokens: int, greedy: bool) -> SamplingOverrides:
    """Exactly so many tokens."""
    return SamplingOverrides(max_tokens=tokens, min_tokens=tokens, temperature=0.0 if greedy else 0.9)


def request_for(number: int) -> GenerateRequest:
    """One of the requests: greedy and drawn with a seed in turn, every fourth in one piece at the end."""
    streaming = number % 4 != 3
    return GenerateRequest(
        prompt_token_ids=[number + 1] * (10 + number),
        seed=number,
        streaming=streaming,
        chunk_frames=CHUNK_FRAMES if streaming else [],
        text_sampling=draws(TEXT_TOKENS, greedy=number % 2 == 0),
        codec_sampling=draws(CODEC_TOKENS, greedy=number // 2 % 2 == 0),
    )


def poison_for(seed: int) -> GenerateRequest:
    """One of them that does to a stage what its seed says."""
    return msgspec.structs.replace(request_for(0), seed=seed)


class Stream(threading.Thread):
    """A client of one request; listens from when it is made.

    Args:
        client: Sends it.
        number: Which request.
        request: Another one than that of the number.

    Attributes:
        heard: What it has heard.
        turned_away: How often it was told to come again, and did.
    """

    def __init__(self, client: Client, number: int, request: GenerateRequest | None = None) -> None:
        super().__init__(name=f"stream-{number}", daemon=True)
        self.number: Final = number
        self._request = request or request_for(number)
        self.heard = Heard()
        self.turned_away = 0
        self._client = client
        self._until = time.monotonic() + COME_AGAIN_S
        self._answer = client.chat(self._request)
        self.start()

    @property
    def request_id(self) -> str | None:
        """The gateway's name of it; none before it is accepted."""
        return self._answer.request_id

    def run(self) -> None:
        while not self._listen() and time.monotonic() < self._until:
            time.sleep(0.1)
            self.turned_away += 1
            self.heard = Heard()
            self._answer = self._client.chat(self._request)

    def _listen(self) -> bool:
        """Hear the answer; False if the request was turned away."""
        try:
            for event in self._answer:
                self.heard.take(event)
        except OmniRelayError as error:
            self.heard.error = error
            self.heard.at.append(time.monotonic())
            return self.request_id is not None or not isinstance(error, StageUnavailableError | BusyError)
        return True

    def cancel(self) -> None:
        """Want no more of it."""
        self._answer.cancel()

    def result(self, until: float) -> Heard:
        """What was heard, once all was; fails when it has not ended by then, in monotonic seconds."""
        self.join(max(0.0, until - time.monotonic()))
        if self.is_alive():
            raise TimeoutError(f"request {self.request_id} (number {self.number}) has not ended in time")
        return self.heard


def speaks(streams: Sequence[Stream]) -> bool:
    """Whether a client hears something by now."""
    return any(stream.heard.chunks for stream in streams)


def heard_of(streams: Sequence[Stream], within_s: float = 240.0) -> list[Heard]:
    """What all of them heard, none of which may have failed."""
    until = time.monotonic() + within_s
    heard = [stream.result(until) for stream in streams]
    assert [each.error for each in heard] == [None] * len(heard)
    return heard


def check_heard(streams: Sequence[Stream], undisturbed: Sequence[Heard]) -> None:
    """Ids, chunk numbers and every sample are those of an undisturbed run."""
    found = {
        stream.number: each.differences(undisturbed[stream.number])
        for stream, each in zip(streams, heard_of(streams), strict=True)
    }
    assert {number: what for number, what in found.items() if what} == {}
