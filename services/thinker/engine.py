"""The thinker's vLLM engine."""

from pathlib import Path

from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from services.thinker.family import SpeechWriter, ThinkerFamily
from services.thinker.media.rules import MediaRules
from services.thinker.penalties import AnswerPenalties
from services.thinker.scheduler import ThinkerScheduler
from services.thinker.warm_up import warm_up
from shared.config import MediaConfig, ThinkerConfig
from shared.vllm.generating import PLAYBACK_MARGIN_KEY
from shared.vllm.platform import build_engine
from shared.vllm.sampling.drawing import DrawProcessor
from shared.vllm.sampling.repetition import RepetitionProcessor


def build_thinker(
    family: ThinkerFamily, model: Path, config: ThinkerConfig, media: MediaConfig
) -> tuple[LLMEngine, MediaRules]:
    """Make the engine for the checkpoint in a directory; gives it and the checkpoint's rules of media."""
    ModelRegistry.register_model(family.architecture, family.model)
    engine = build_engine(
        "thinker",
        model,
        config.engine,
        log_stats=config.http is not None,
        hf_overrides={"architectures": [family.architecture]},
        scheduler_cls=ThinkerScheduler,
        worker_cls="services.thinker.worker.ThinkerWorker",
        logits_processors=[RepetitionProcessor, AnswerPenalties, DrawProcessor],
        enable_prefix_caching=config.engine.enable_prefix_caching,
        additional_config={PLAYBACK_MARGIN_KEY: config.playback_margin_s},
        # A video may bring its sound.
        limit_mm_per_prompt={
            "audio": media.max_audios + media.max_videos,
            "image": media.max_images,
            "video": media.max_videos,
        },
        # Items are kept before they get to vLLM, by their files' digests (services.thinker.media.preparer).
        mm_processor_cache_gb=0,
        # There is no memory to be measured on a CPU: its KV cache has the size it is given.
        skip_mm_profiling=current_platform.is_cpu(),
    )
    rules = family.media(engine, media)
    core = engine.engine_core.engine_core
    core.scheduler.heard_s = 1 / family.rows_per_s
    if not current_platform.is_cpu():
        warm_up(engine, rules, family.end_tokens(engine.model_config.hf_config))
    return engine, rules


def speech_writer(family: ThinkerFamily, engine: LLMEngine, model: Path) -> SpeechWriter:
    """Read the rows that no step computes; raises CheckpointError at damaged voices or unknown tokens."""
    return family.speech(
        engine.model_config.hf_config,
        model,
        lambda ids: engine.collective_rpc("embed_tokens", args=(ids,))[0],
    )
