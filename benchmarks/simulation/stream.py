"""One answer in the simulation: what has been made of it, and what its listener has heard."""

from dataclasses import dataclass
from typing import Final

from benchmarks.measure.workload import CODEC_RATE, Workload
from benchmarks.simulation.step_times import CODES_OF_A_BLOCK

BLOCK_S: Final = CODES_OF_A_BLOCK / CODEC_RATE
"""Seconds of speech of a block."""


@dataclass(eq=False)
class Stream:
    """One answer.

    Attributes:
        workload: Its lengths.
        asked: When its request came.
        written: Text tokens so far.
        spoken: Codec tokens so far.
        sent_blocks: Blocks of audio that the listener has.
        chunks: Into how many chunks they were cut.
        first_text: When the first text came.
        first_audio: When the first audio came.
        heard_until: When the listener has heard all that came.
        silent_s: How long the listener had nothing to hear, between pieces.
        done: When the last audio came.
    """

    workload: Workload
    asked: float
    written: int = 0
    spoken: int = 0
    sent_blocks: int = 0
    chunks: int = 0
    first_text: float | None = None
    first_audio: float | None = None
    heard_until: float = 0.0
    silent_s: float = 0.0
    done: float | None = None

    @property
    def blocks(self) -> int:
        """Blocks of the whole speech."""
        return -(-self.workload.codec_tokens // CODES_OF_A_BLOCK)

    @property
    def all_written(self) -> bool:
        """The text is complete."""
        return self.written >= self.workload.text_tokens

    @property
    def all_spoken(self) -> bool:
        """All codec tokens are there."""
        return self.spoken >= self.workload.codec_tokens

    def slack_s(self, made_s: float, now: float) -> float:
        """By how much what was made, in seconds of speech, is ahead of the listener."""
        heard = 0.0
        if self.first_audio is not None:
            heard = self.sent_blocks * BLOCK_S - max(0.0, self.heard_until - now)
        return made_s - heard

    def take_audio(self, blocks: int, now: float) -> None:
        """A chunk reached the listener, who plays from the first one on."""
        if self.first_audio is None:
            self.first_audio = self.heard_until = now
        elif now > self.heard_until:
            self.silent_s += now - self.heard_until
            self.heard_until = now
        self.heard_until += blocks * BLOCK_S
        self.sent_blocks += blocks
        self.chunks += 1
        if self.sent_blocks >= self.blocks:
            self.done = now
