"""How much of prompts is computed in a step while replies are due."""

import time
from collections.abc import Sequence
from typing import Any, Final

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

FIRST_TOKENS: Final = 128
MIN_TOKENS: Final = 16
SLOWDOWN: Final = 2.0
"""A step with a piece may take this much longer than one without."""
_NEW: Final = 0.2
"""Weight of the newest step in the mean."""


class PieceSize:
    """The number of prompt tokens with which a step still serves replies that are being heard.

    Such a step lasts a given time or, where that is longer, twice as long as one without prompts.  The size
    follows the measured steps, up to ``most``.

    Attributes:
        tokens: The size.
    """

    def __init__(self, most: int) -> None:
        self.tokens = min(FIRST_TOKENS, most)
        self._most = most
        self._without_s: float | None = None

    def took(self, seconds: float, prompt_tokens: int, least_s: float) -> None:
        """Take the duration of a step; only those without prompts and those with a whole piece count.

        Args:
            prompt_tokens: What it computed of prompts.
            least_s: What a step with a piece may take in any case.
        """
        if prompt_tokens == 0:
            before = seconds if self._without_s is None else self._without_s
            self._without_s = before + _NEW * (seconds - before)
        elif prompt_tokens == self.tokens:
            wanted = max(least_s, SLOWDOWN * (self._without_s or 0.0))
            factor = min(2.0, max(0.5, wanted / seconds)) if seconds > 0 else 2.0
            self.tokens = max(min(MIN_TOKENS, self._most), min(self._most, round(factor * self.tokens)))


class PromptPieces:
    """Cuts prompts while replies are due, so that a long one does not stop them.

    Args:
        scheduler: Whose steps these are; its ``max_num_scheduled_tokens`` is set for each.

    Attributes:
        heard_s: Seconds of speech that a step makes of each reply; set when the engine is built.
        size: How large a piece is.
    """

    def __init__(self, scheduler: Any) -> None:
        self.heard_s = 0.0
        self._scheduler = scheduler
        self._most: int = scheduler.scheduler_config.max_num_batched_tokens
        self.size = PieceSize(self._most)
        self._begun = 0.0

    def forget_steps(self) -> None:
        """Begin anew to measure how long steps take."""
        self.size = PieceSize(self._most)

    def cut(self, ready: Sequence[Request], due: Sequence[Request]) -> None:
        """Bound the next step: one token of each reply, and a piece of prompts if some reply is due.

        Args:
            ready: The running requests of the step.
            due: Requests whose listeners need more soon.
        """
        scheduler = self._scheduler
        scheduler.max_num_scheduled_tokens = self._most
        if not all(map(_in_prompt, due)):
            # Replies first, or prompts would take their tokens.
            scheduler.running.sort(key=_in_prompt)
            replies = sum(not _in_prompt(request) for request in ready)
            scheduler.max_num_scheduled_tokens = min(self._most, replies + self.size.tokens)

    def begin(self) -> None:
        """A step was scheduled, and is computed now."""
        self._begun = time.monotonic()

    def end(self, output: SchedulerOutput) -> None:
        """That step was computed."""
        # Encoders of media take a time of their own.
        if output.num_scheduled_tokens and not output.scheduled_encoder_inputs:
            prompt_tokens = sum(count for count in output.num_scheduled_tokens.values() if count > 1)
            self.size.took(time.monotonic() - self._begun, prompt_tokens, self.heard_s)


def _in_prompt(request: Request) -> bool:
    """Whether more than the next token of its reply is to be computed."""
    return bool(request.num_tokens - request.num_computed_tokens > 1)
