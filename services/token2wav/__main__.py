"""``python -m services.token2wav --config FILE`` runs token2wav."""

from pathlib import Path

from services.families.known import family_of, require_family
from services.families.memory import placed
from shared.checkpoints import read_config
from shared.config import Config
from shared.messages import Token2WavInput
from shared.stage.gateways import GatewayQueues
from shared.stage.process import Built, Context, run_stage


def build(config: Config, model: Path, context: Context, gateway: GatewayQueues) -> Built:  # noqa: ARG001
    """Make token2wav's service, which sends to the gateway alone."""
    from services.token2wav.service import Token2WavService  # noqa: PLC0415 - after the environment is prepared

    family = family_of(read_config(model)).token2wav()
    with placed(config, "token2wav", config.stages.token2wav, model) as stage:
        return Token2WavService(family, model, stage, gateway), None


if __name__ == "__main__":
    run_stage("token2wav", Token2WavInput, build, require_family)
