"""``python -m services.talker --config FILE`` runs the talker."""

from pathlib import Path

from services.families.known import family_of, require_family
from services.families.memory import placed
from shared.checkpoints import read_config
from shared.config import Config
from shared.messages import TalkerInput, Token2WavInput
from shared.stage.gateways import GatewayQueues
from shared.stage.process import Built, Context, run_stage
from shared.transport.routing import PeerQueues


def build(config: Config, model: Path, context: Context, gateway: GatewayQueues) -> Built:
    """Make the talker's service."""
    from services.talker.service import TalkerService  # noqa: PLC0415 - after the environment is prepared

    family = family_of(read_config(model)).talker()
    token2wav: PeerQueues[Token2WavInput] = PeerQueues(context, "token2wav", gateway.sending)
    with placed(config, "talker", config.stages.talker, model) as stage:
        return TalkerService(family, model, stage, gateway, token2wav), token2wav


if __name__ == "__main__":
    run_stage("talker", TalkerInput, build, require_family)
