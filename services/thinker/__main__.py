"""``python -m services.thinker --config FILE`` runs the thinker."""

from pathlib import Path
from typing import Any

from shared.config import Config
from shared.messages import StageEvent, TalkerInput, ThinkerInput
from shared.stage.process import Context, run_stage
from shared.stage.service import StageService
from shared.transport.queues import PushQueue
from shared.transport.routing import PeerQueues
from shared.vllm.environment import give_back_large_blocks


def build(
    config: Config, model: Path, context: Context, gateway: PushQueue[StageEvent]
) -> tuple[StageService[Any], PeerQueues[Any]]:
    """Make the thinker's service."""
    from services.thinker.service import ThinkerService  # noqa: PLC0415 - after the environment is prepared

    give_back_large_blocks()
    stage, receiver = config.stages.thinker, config.stages.talker
    talker: PeerQueues[TalkerInput] = PeerQueues(context, "talker", gateway.sending)
    service = ThinkerService(model, stage, gateway, talker, config.media, receiver.max_payload_bytes)
    return service, talker


if __name__ == "__main__":
    run_stage("thinker", ThinkerInput, build)
