"""What is asked: prompts of a fixed length, and answers whose lengths are forced."""

import random
from pathlib import Path
from typing import Final

import msgspec

from shared.checkpoints import read_config

CODEC_RATE: Final = 50
"""Codec tokens a second of speech."""
PROMPT_TOKENS: Final = 58
TEXT_RATE: Final = CODEC_RATE * 30 / 128
"""Text tokens a second of speech."""
SPEAKER: Final = "Ethan"
SEED: Final = 11
ORDINARY_TOKENS: Final = 1400
"""Ids below are ordinary text in every checkpoint of ours."""
NEWLINE: Final = 10


class Speech(msgspec.Struct, frozen=True):
    """How a checkpoint's speech is counted, and what a prompt needs to be spoken to.

    Attributes:
        rate: Codec frames a second.
        groups: Codec ids of a frame.
        before: Token ids before a prompt's own.
        behind: Token ids behind them.
    """

    rate: float = CODEC_RATE
    groups: int = 1
    before: list[int] = []
    behind: list[int] = []

    @classmethod
    def of(cls, model: Path) -> "Speech":
        """That of a checkpoint: with roles a prompt is a user's turn."""
        config = read_config(model)
        if "user_token_id" not in config:
            return cls()
        begin, end = config["im_start_token_id"], config["im_end_token_id"]
        header = [begin, config["assistant_token_id"], NEWLINE]
        groups = config["talker_config"]["num_code_groups"]
        return cls(12.5, groups, [begin, config["user_token_id"], NEWLINE], [end, NEWLINE, *header])


QWEN2_5: Final = Speech()


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of request.

    Attributes:
        prompt_tokens: Length of the prompt.
        text_tokens: Length of the text, forced.
        codec_tokens: Length of the speech in frames, forced.
        speech: Whose.
    """

    prompt_tokens: int
    text_tokens: int
    codec_tokens: int
    speech: Speech = QWEN2_5

    @property
    def seconds(self) -> float:
        """Length of the speech."""
        return self.codec_tokens / self.speech.rate

    def prompt(self, index: int) -> list[int]:
        """Token ids of a prompt; each index gives another, so that no prefix cache can help."""
        generator = random.Random(f"{self.prompt_tokens}/{index}")  # noqa: S311 - nothing secret
        own = [generator.randrange(ORDINARY_TOKENS) for _ in range(self.prompt_tokens)]
        return [*self.speech.before, *own, *self.speech.behind]


def answer_of(seconds: float, speech: Speech = QWEN2_5) -> Workload:
    """The request whose answer is speech of this length."""
    codec_tokens = max(1, round(seconds * speech.rate))
    return Workload(
        prompt_tokens=PROMPT_TOKENS,
        text_tokens=max(2, round(codec_tokens * TEXT_RATE / speech.rate)),
        codec_tokens=codec_tokens,
        speech=speech,
    )
