"""``python -m services.token2wav --config FILE`` runs token2wav."""

from pathlib import Path
from typing import Any

from shared.config import Config
from shared.messages import StageEvent, Token2WavInput
from shared.stage.process import Context, run_stage
from shared.stage.service import StageService
from shared.transport.queues import PushQueue


def build(
    config: Config,
    model: Path,
    context: Context,  # noqa: ARG001 - all stages are built alike; this one sends to the gateway alone
    gateway: PushQueue[StageEvent],
) -> tuple[StageService[Any], None]:
    """Make token2wav's service."""
    from services.token2wav.service import Token2WavService  # noqa: PLC0415 - after the environment is prepared

    return Token2WavService(model, config.stages.token2wav, gateway), None


if __name__ == "__main__":
    run_stage("token2wav", Token2WavInput, build)
