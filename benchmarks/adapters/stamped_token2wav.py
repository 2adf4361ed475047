"""``python -m benchmarks.adapters.stamped_token2wav --config FILE``: token2wav, noting when it sends."""

from pathlib import Path
from typing import Any

from benchmarks.adapters.stamps import note_chunks
from services.token2wav.__main__ import build
from shared.config import Config
from shared.messages import Token2WavInput
from shared.stage.gateways import GatewayQueues
from shared.stage.process import Context, run_stage
from shared.stage.service import StageService


def build_noting(
    config: Config, model: Path, context: Context, gateway: GatewayQueues
) -> tuple[StageService[Any], None]:
    """Make token2wav's service."""
    note_chunks(gateway)
    return build(config, model, context, gateway)


if __name__ == "__main__":
    run_stage("token2wav", Token2WavInput, build_noting)
