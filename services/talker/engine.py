"""The talker's vLLM engine."""

from pathlib import Path

from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from services.talker.family import SpeechRules, TalkerFamily
from services.talker.scheduler import TalkerScheduler
from services.talker.warm_up import warm_up
from shared.config import TalkerConfig
from shared.messages import SAMPLE_RATE
from shared.vllm.generating import PLAYBACK_MARGIN_KEY
from shared.vllm.platform import build_engine
from shared.vllm.sampling.drawing import DrawProcessor
from shared.vllm.sampling.repetition import RepetitionProcessor


def build_talker(family: TalkerFamily, model: Path, config: TalkerConfig) -> tuple[LLMEngine, SpeechRules]:
    """Make the engine for the checkpoint in a directory; gives it and how the checkpoint speaks."""
    ModelRegistry.register_model(family.architecture, family.model)
    engine = build_engine(
        "talker",
        model,
        config.engine,
        log_stats=config.http is not None,
        hf_overrides=family.config,
        scheduler_cls=TalkerScheduler,
        worker_cls="services.talker.worker.TalkerWorker",
        logits_processors=[RepetitionProcessor, DrawProcessor],
        skip_tokenizer_init=True,
        # A prompt's token ids are all alike, so equal prompts could not be told apart.
        enable_prefix_caching=False,
        additional_config={PLAYBACK_MARGIN_KEY: config.playback_margin_s},
    )
    rules = family.speech(engine.model_config.hf_config)
    engine.engine_core.engine_core.scheduler.heard_s = rules.codec.frame_samples / SAMPLE_RATE
    if not current_platform.is_cpu():
        warm_up(engine, rules)
    return engine, rules
