"""``python -m services.thinker --config FILE`` runs the thinker."""

from pathlib import Path

from services.families.known import family_of, require_family
from services.families.memory import placed
from shared.checkpoints import read_config
from shared.config import Config
from shared.messages import TalkerInput, ThinkerInput
from shared.stage.gateways import GatewayQueues
from shared.stage.process import Built, Context, run_stage
from shared.transport.routing import PeerQueues
from shared.vllm.environment import give_back_large_blocks


def build(config: Config, model: Path, context: Context, gateway: GatewayQueues) -> Built:
    """Make the thinker's service."""
    from services.thinker.service import ThinkerService  # noqa: PLC0415 - after the environment is prepared

    give_back_large_blocks()
    most_bytes = config.stages.talker.max_payload_bytes
    family = family_of(read_config(model)).thinker()
    talker: PeerQueues[TalkerInput] = PeerQueues(context, "talker", gateway.sending)
    with placed(config, "thinker", config.stages.thinker, model) as stage:
        return ThinkerService(family, model, stage, gateway, talker, config.media, most_bytes), talker


if __name__ == "__main__":
    run_stage("thinker", ThinkerInput, build, require_family)
