"""What the schedulers of both autoregressive stages have in common.

Replies that are played take turns, and while some are due, prompts are computed in pieces: a long one does
not stop them.
"""

import math
import time
from collections.abc import Iterable
from typing import Any, Final

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from shared.playback import PlaybackClock, has_slack
from shared.vllm.conditioning import SlotMap
from shared.vllm.scheduling import StageScheduler

PLAYBACK_MARGIN_KEY: Final = "playback_margin_s"
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


class GeneratingScheduler(StageScheduler):
    """A stage's scheduler that knows when each request is due, and cuts prompts into pieces.

    ``additional_config["playback_margin_s"]`` is how long before it is due a reply is urgent.

    Attributes:
        heard_s: Seconds of speech that a step makes of each reply; set when the engine is built.
        piece: How large a piece of a prompt is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slot_map = SlotMap(self.kv_cache_config, self.kv_cache_manager)
        self._clocks: dict[str, PlaybackClock] = {}
        self._margin_s = float(self.vllm_config.additional_config[PLAYBACK_MARGIN_KEY])
        self.heard_s = 0.0
        self._most: int = self.scheduler_config.max_num_batched_tokens
        self.piece = PieceSize(self._most)
        self._begun = 0.0

    def forget_steps(self) -> None:
        """See :meth:`StageScheduler.forget_steps`."""
        super().forget_steps()
        self.piece = PieceSize(self._most)

    def attach(self, engine_id: str, clock: PlaybackClock) -> None:
        """Say when a request is due; right after it was added."""
        self._clocks[engine_id] = clock

    def urgent(self, requests: Iterable[Request]) -> list[Request]:
        """Those that are due within the margin."""
        soon = time.monotonic() + self._margin_s if self._margin_s else -math.inf
        return [each for each in requests if self._clocks[each.request_id].due <= soon]

    def without_ahead(self, requests: list[Request]) -> list[Request]:
        """Those that do not wait for others that are due earlier."""
        ahead = has_slack(
            {each.request_id: self._clocks[each.request_id].due for each in requests}, self._margin_s
        )
        return [each for each in requests if each.request_id not in ahead]

    def schedule_only(
        self, ready: list[Request], urgent: list[Request], throttle_prefills: bool, most: int | None = None
    ) -> SchedulerOutput:
        """Schedule a step without the other running requests, of at most so many tokens.

        If some reply is ``urgent``, it has one token of each reply, and a piece of prompts.
        """
        names = {request.request_id for request in ready}
        self.pass_over([request for request in self.running if request.request_id not in names])
        tokens = self._most if most is None else min(most, self._most)
        if not all(map(_in_prompt, urgent)):
            # Replies first, or prompts would take their tokens.
            self.running.sort(key=_in_prompt)
            replies = sum(not _in_prompt(request) for request in ready)
            tokens = min(tokens, replies + self.piece.tokens)
        self.max_num_scheduled_tokens: int = tokens
        output = super().schedule(throttle_prefills)
        self._begun = time.monotonic()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take what a step computed, and how long it took."""
        # Encoders of media take a time of their own.
        if scheduler_output.num_scheduled_tokens and not scheduler_output.scheduled_encoder_inputs:
            counts = scheduler_output.num_scheduled_tokens.values()
            prompt_tokens = sum(count for count in counts if count > 1)
            self.piece.took(time.monotonic() - self._begun, prompt_tokens, self.heard_s)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        return outputs

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._clocks.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)


def _in_prompt(request: Request) -> bool:
    """Whether more than the next token of its reply is to be computed."""
    return bool(request.num_tokens - request.num_computed_tokens > 1)
