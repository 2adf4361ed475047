"""The talker's vLLM engine."""

from pathlib import Path
from typing import Any

from vllm.model_executor.models import ModelRegistry
from vllm.v1.engine.llm_engine import LLMEngine

from services.talker.model import MROPE_SECTION, ConditionedTalker
from services.talker.scheduler import TalkerScheduler
from shared.config import EngineConfig
from shared.engine.platform import build_engine
from shared.errors import CheckpointError

ARCHITECTURE = "OmniRelayConditionedTalker"


def build_talker(model: Path, config: EngineConfig) -> LLMEngine:
    """Make the talker's engine.

    Args:
        model: Directory of the checkpoint.
        config: The stage's engine configuration.
    """
    ModelRegistry.register_model(ARCHITECTURE, ConditionedTalker)
    return build_engine(
        model,
        config,
        hf_overrides=_talker_config,
        scheduler_cls=TalkerScheduler,
        worker_cls="services.talker.worker.TalkerWorker",
        skip_tokenizer_init=True,
        # A prompt's token ids are all alike, so equal prompts could not be told apart.
        enable_prefix_caching=False,
    )


def _talker_config(config: Any) -> Any:
    """The talker's part of a whole model's configuration, as vLLM is to see it."""
    talker = getattr(config, "talker_config", None)
    if talker is None:
        return config
    rope = dict(talker.rope_parameters or {})
    if "mrope_section" not in rope:
        raise CheckpointError("config.json: talker_config names no mrope_section in its rope parameters")
    setattr(talker, MROPE_SECTION, rope.pop("mrope_section"))
    talker.rope_parameters = rope
    talker.architectures = [ARCHITECTURE]
    return talker
