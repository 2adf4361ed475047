"""The talker's vLLM engine."""

from functools import partial
from pathlib import Path
from typing import Any

from vllm.model_executor.models import ModelRegistry
from vllm.v1.engine.llm_engine import LLMEngine

from services.talker.model import MROPE_SECTION, SILENT_TOKENS, ConditionedTalker
from services.talker.scheduler import PLAYBACK_MARGIN_KEY, TalkerScheduler
from shared.config import TalkerConfig
from shared.engine.nucleus import NucleusProcessor
from shared.engine.platform import build_engine
from shared.engine.repetition import RepetitionProcessor
from shared.errors import CheckpointError

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
        hf_overrides=partial(_talker_config, prompt_mode=config.prompt_mode),
        scheduler_cls=TalkerScheduler,
        worker_cls="services.talker.worker.TalkerWorker",
        logits_processors=[RepetitionProcessor, NucleusProcessor],
        skip_tokenizer_init=True,
        # A prompt's token ids are all alike, so equal prompts could not be told apart.
        enable_prefix_caching=False,
        additional_config={PLAYBACK_MARGIN_KEY: config.playback_margin_s},
    )


def _talker_config(config: Any, prompt_mode: str) -> Any:
    """The talker's part of a whole model's configuration, as vLLM is to see it."""
    talker = getattr(config, "talker_config", None)
    if talker is None:
        return config
    dit = config.token2wav_config.dit_config
    setattr(talker, CODES_PER_BLOCK, max(1, dit.block_size // dit.repeats))
    rope = dict(talker.rope_parameters or {})
    if "mrope_section" not in rope:
        raise CheckpointError("config.json: talker_config names no mrope_section in its rope parameters")
    sections = rope.pop("mrope_section")
    talker.rope_parameters = rope
    silent = [talker.tts_codec_mask_token_id]
    if prompt_mode == "unpadded":
        # The three position ids of a row are then equal.
        sections = None
        silent += [talker.tts_codec_pad_token_id, talker.tts_codec_start_token_id]
    setattr(talker, MROPE_SECTION, sections)
    setattr(talker, SILENT_TOKENS, silent)
    talker.architectures = [ARCHITECTURE]
    return talker
