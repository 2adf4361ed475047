"""A stage's service alone in this process: no queues, no gateway."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from shared.config import StageConfig, TalkerConfig, ThinkerConfig, Token2WavConfig
from shared.messages import STAGES, StageName

DEFAULTS: Final[dict[StageName, StageConfig]] = {
    "thinker": ThinkerConfig(http=None),
    "talker": TalkerConfig(http=None),
    "token2wav": Token2WavConfig(http=None),
}


class Sink:
    """Takes the place of the queues to the gateway and to the next stage, and keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def put(self, message: Any) -> int:
        """Keep a message."""
        self.sent.append(message)
        return 1

    def stalls(self, _: str) -> bool:
        """Keep up with everything."""
        return False

    def of(self, kind: type[Any]) -> list[Any]:
        """What was sent of one kind, in its order."""
        return [message for message in self.sent if isinstance(message, kind)]


def service_of(
    stage: StageName, model: Path, config: StageConfig | None = None, stages: int = len(STAGES)
) -> tuple[Any, Sink]:
    """Prepare this process, which must not have loaded torch, and make a stage's service.

    Args:
        stage: Which.
        model: Directory of the checkpoint.
        config: The stage's, if not the default one.
        stages: How many share the machine, which decides on threads.

    Returns:
        The service, and what collects all that it sends.
    """
    from shared.vllm.environment import prepare_environment  # noqa: PLC0415 - it imports torch at its end

    config = config or DEFAULTS[stage]
    # vLLM's and transformers' remarks about our choices.  By handlers: vLLM's logger decides on its checks.
    logging.basicConfig(level=logging.ERROR)
    for handler in logging.root.handlers:
        handler.setLevel(logging.ERROR)
    prepare_environment(config, stages)
    from services.families.known import family_of  # noqa: PLC0415 - the environment comes first
    from services.talker.service import TalkerService  # noqa: PLC0415 - as above
    from services.thinker.service import ThinkerService  # noqa: PLC0415 - as above
    from services.token2wav.service import Token2WavService  # noqa: PLC0415 - as above
    from shared.checkpoints import read_config  # noqa: PLC0415 - the environment comes first

    family, sink = family_of(read_config(model)), Sink()
    queue: Any = sink
    if isinstance(config, ThinkerConfig):
        return ThinkerService(family.thinker(), model, config, queue, queue), sink
    if isinstance(config, TalkerConfig):
        return TalkerService(family.talker(), model, config, queue, queue), sink
    if isinstance(config, Token2WavConfig):
        return Token2WavService(family.token2wav(), model, config, queue), sink
    raise TypeError(stage)


def finish(service: Any, each_step: Callable[[float], object] = lambda _: None) -> None:
    """Step until all requests have ended; ``each_step`` gets the milliseconds of each step."""
    while service.active_requests():
        started = time.perf_counter()
        if failures := service.step():
            raise next(iter(failures.values()))
        each_step(1000 * (time.perf_counter() - started))
