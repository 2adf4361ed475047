"""``python -m services.talker --config FILE`` runs the talker."""

from pathlib import Path
from typing import Any

from shared.config import Config
from shared.engine.process import Context, run_stage
from shared.engine.stage import StageService
from shared.messages import StageEvent, TalkerInput, Token2WavInput
from shared.queues import PushQueue


def build(
    config: Config, model: Path, context: Context, gateway: PushQueue[StageEvent]
) -> tuple[StageService[Any], dict[str, PushQueue[Any]]]:
    """Make the talker's service."""
    from services.talker.service import TalkerService  # noqa: PLC0415 - after the environment is prepared

    stage = config.stages.talker
    token2wav: PushQueue[Token2WavInput] = PushQueue(
        context, config.stages.token2wav.inbox, stage.max_backlog_bytes, "token2wav"
    )
    return TalkerService(model, stage, gateway, token2wav), {"token2wav": token2wav}


if __name__ == "__main__":
    run_stage("talker", TalkerInput, build)
