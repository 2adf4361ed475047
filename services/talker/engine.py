"""The talker's vLLM engine."""

from pathlib import Path
from typing import Any

from vllm.model_executor.models import ModelRegistry
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import CheckpointError
from services.talker.model import CODES, MROPE_SECTION, ConditionedTalker
from services.talker.scheduler import PLAYBACK_MARGIN_KEY, TalkerScheduler
from shared.config import TalkerConfig
from shared.vllm.platform import build_engine
from shared.vllm.sampling.nucleus import NucleusProcessor
from shared.vllm.sampling.repetition import RepetitionProcessor

ARCHITECTURE = "OmniRelayConditionedTalker"
CODES_PER_BLOCK = "codes_per_block"
"""Codec tokens in an attention block of token2wav's DiT, in the configuration that the engine keeps."""


def build_talker(model: Path, config: TalkerConfig) -> LLMEngine:
    """Make the talker's engine.

    Args:
        model: Directory of the checkpoint.
        config: The stage's configuration.
    """
    ModelRegistry.register_model(ARCHITECTURE, ConditionedTalker)
    return build_engine(
        "talker",
        model,
        config.engine,
        log_stats=config.http is not None,
        hf_overrides=_talker_config,
        scheduler_cls=TalkerScheduler,
        worker_cls="services.talker.worker.TalkerWorker",
        logits_processors=[RepetitionProcessor, NucleusProcessor],
        skip_tokenizer_init=True,
        # A prompt's token ids are all alike, so equal prompts could not be told apart.
        enable_prefix_caching=False,
        additional_config={PLAYBACK_MARGIN_KEY: config.playback_margin_s},
    )


def _talker_config(config: Any) -> Any:
    """The talker's part of a whole model's configuration, as vLLM is to see it."""
    talker = getattr(config, "talker_config", None)
    if talker is None:
        return config
    dit = config.token2wav_config.dit_config
    setattr(talker, CODES_PER_BLOCK, max(1, dit.block_size // dit.repeats))
    # The table has a row more than num_embeds says (reference: DiTCodecEmbedding).
    setattr(talker, CODES, dit.num_embeds + 1)
    rope = dict(talker.rope_parameters or {})
    if "mrope_section" not in rope:
        raise CheckpointError("config.json: talker_config names no mrope_section in its rope parameters")
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(
            f"config.json: the rope_type of talker_config is {rope.get('rope_type')!r}, not 'default'"
        )
    setattr(talker, MROPE_SECTION, rope.pop("mrope_section"))
    talker.rope_parameters = rope
    talker.architectures = [ARCHITECTURE]
    return talker
