"""``python -m services.talker --config FILE`` runs the talker."""

from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from services.families.family import Families
from services.families.known import FAMILIES, family_of, read_config, require_family
from services.families.placement import placed
from shared.config import Config
from shared.messages import TalkerInput, Token2WavInput
from shared.stage.gateways import GatewayQueues
from shared.stage.process import Context, run_stage
from shared.stage.service import StageService
from shared.transport.routing import PeerQueues


def build(
    config: Config,
    model: Path,
    context: Context,
    gateway: GatewayQueues,
    families: Families = FAMILIES,
) -> tuple[StageService[Any], PeerQueues[Any] | None]:
    """Make the talker's service."""
    from services.talker.service import TalkerService  # noqa: PLC0415 - after the environment is prepared

    family = family_of(read_config(model), families).talker()
    token2wav: PeerQueues[Token2WavInput] = PeerQueues(context, "token2wav", gateway.sending)
    with placed(config, "talker", config.stages.talker, model, families) as stage:
        return TalkerService(family, model, stage, gateway, token2wav), token2wav


def main(families: Families = FAMILIES) -> NoReturn:
    """Run the talker with these model families."""
    check = partial(require_family, families=families)
    run_stage("talker", TalkerInput, partial(build, families=families), check)


if __name__ == "__main__":
    main()
