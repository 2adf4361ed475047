"""What is asked: prompts of a fixed length, and answers whose lengths are forced."""

import random
from typing import Final

import msgspec

CODEC_RATE: Final = 50
"""Codec tokens a second of speech."""
PROMPT_TOKENS: Final = 58
TEXT_PER_CODEC: Final = 30 / 128
"""Text tokens for each codec token of an answer."""
SPEAKER: Final = "Ethan"
SEED: Final = 11
ORDINARY_TOKENS: Final = 1400
"""Ids below are ordinary text in every checkpoint of ours."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of request.

    Attributes:
        prompt_tokens: Length of the prompt.
        text_tokens: Length of the text, forced.
        codec_tokens: Length of the speech, forced; :data:`CODEC_RATE` make a second.
    """

    prompt_tokens: int
    text_tokens: int
    codec_tokens: int

    @property
    def seconds(self) -> float:
        """Length of the speech."""
        return self.codec_tokens / CODEC_RATE

    def prompt(self, index: int) -> list[int]:
        """Token ids of a prompt; each index gives another, so that no prefix cache can help."""
        generator = random.Random(f"{self.prompt_tokens}/{index}")  # noqa: S311 - nothing secret
        return [generator.randrange(ORDINARY_TOKENS) for _ in range(self.prompt_tokens)]


def answer_of(seconds: float) -> Workload:
    """The request whose answer is speech of this length."""
    codec_tokens = max(1, round(seconds * CODEC_RATE))
    return Workload(
        prompt_tokens=PROMPT_TOKENS,
        text_tokens=max(2, round(codec_tokens * TEXT_PER_CODEC)),
        codec_tokens=codec_tokens,
    )
