"""``python -m services.talker --config FILE`` runs the talker."""

from pathlib import Path
from typing import Any

from shared.config import Config
from shared.messages import StageEvent, TalkerInput, Token2WavInput
from shared.stage.process import Context, run_stage
from shared.stage.service import StageService
from shared.transport.queues import PushQueue
from shared.transport.routing import PeerQueues


def build(
    config: Config, model: Path, context: Context, gateway: PushQueue[StageEvent]
) -> tuple[StageService[Any], PeerQueues[Any]]:
    """Make the talker's service."""
    from services.talker.service import TalkerService  # noqa: PLC0415 - after the environment is prepared

    stage = config.stages.talker
    token2wav: PeerQueues[Token2WavInput] = PeerQueues(context, "token2wav", gateway.sending)
    return TalkerService(model, stage, gateway, token2wav), token2wav


if __name__ == "__main__":
    run_stage("talker", TalkerInput, build)
