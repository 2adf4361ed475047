"""``python -m services.token2wav --config FILE`` runs token2wav."""

from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from services.families.family import Families
from services.families.known import FAMILIES, family_of, read_config, require_family
from services.families.placement import placed
from shared.config import Config
from shared.messages import Token2WavInput
from shared.stage.gateways import GatewayQueues
from shared.stage.process import Context, run_stage
from shared.stage.service import StageService


def build(
    config: Config,
    model: Path,
    context: Context,  # noqa: ARG001 - all stages are built alike; this one sends to the gateway alone
    gateway: GatewayQueues,
    families: Families = FAMILIES,
) -> tuple[StageService[Any], None]:
    """Make token2wav's service."""
    from services.token2wav.service import Token2WavService  # noqa: PLC0415 - after the environment is prepared

    family = family_of(read_config(model), families).token2wav()
    with placed(config, "token2wav", config.stages.token2wav, model, families) as stage:
        return Token2WavService(family, model, stage, gateway), None


def main(families: Families = FAMILIES) -> NoReturn:
    """Run token2wav with these model families."""
    check = partial(require_family, families=families)
    run_stage("token2wav", Token2WavInput, partial(build, families=families), check)


if __name__ == "__main__":
    main()
