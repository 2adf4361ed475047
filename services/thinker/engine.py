"""The thinker's vLLM engine, and what its checkpoint says about speech."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import CheckpointError
from services.thinker.blocks import hash_replies_apart
from services.thinker.media.spans import Clock
from services.thinker.model import SpeakingThinker
from services.thinker.scheduler import ThinkerScheduler
from shared.config import MediaConfig, ThinkerConfig
from shared.vllm.platform import build_engine
from shared.vllm.sampling.nucleus import NucleusProcessor
from shared.vllm.sampling.repetition import RepetitionProcessor
from shared.vllm.speakers import load_speakers

ARCHITECTURE = "OmniRelaySpeakingThinker"


@dataclass(frozen=True)
class SpeechEmbeddings:
    """Rows of the track that are plain text embeddings, read once.

    Attributes:
        voices: Embedding ``[hidden]`` of each voice's start token, by name.
        closing: Embeddings ``[2, hidden]`` of the text end and the text pad token.
    """

    voices: dict[str, torch.Tensor]
    closing: torch.Tensor


def build_thinker(model: Path, config: ThinkerConfig, media: MediaConfig) -> LLMEngine:
    """Make the thinker's engine.

    Args:
        model: Directory of the checkpoint.
        config: The stage's configuration.
        media: What a request may bring.
    """
    ModelRegistry.register_model(ARCHITECTURE, SpeakingThinker)
    engine = build_engine(
        "thinker",
        model,
        config.engine,
        log_stats=config.http is not None,
        hf_overrides={"architectures": [ARCHITECTURE]},
        scheduler_cls=ThinkerScheduler,
        worker_cls="services.thinker.worker.ThinkerWorker",
        logits_processors=[RepetitionProcessor, NucleusProcessor],
        enable_prefix_caching=config.engine.enable_prefix_caching,
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
    core = engine.engine_core.engine_core
    if core.request_block_hasher is not None:
        clock = Clock.of(engine.model_config.hf_config.thinker_config)
        core.request_block_hasher = hash_replies_apart(
            core.request_block_hasher, core.scheduler.hash_block_size, clock
        )
    return engine


def end_token_ids(hf_config: Any) -> list[int]:
    """The tokens that end a reply: the thinker's ``eos_token_id``, as transformers' generate takes it.

    Args:
        hf_config: The engine's Hugging Face configuration, of the thinker or of the whole model.

    Raises:
        CheckpointError: config.json names none.
    """
    thinker = getattr(hf_config, "thinker_config", hf_config)
    for config in (thinker, thinker.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return list(ids) if isinstance(ids, list | tuple) else [int(ids)]
    raise CheckpointError("config.json: thinker_config names no eos_token_id, so no reply would ever end")


def read_speech_embeddings(engine: LLMEngine, model: Path) -> SpeechEmbeddings:
    """Read the rows that belong to voices and to the end of a reply.

    Args:
        engine: The thinker's engine.
        model: Directory of the checkpoint.

    Raises:
        CheckpointError: The voices cannot be read, or a token lies outside the vocabulary.
    """
    speakers = load_speakers(model)
    talker = engine.model_config.hf_config.talker_config
    closing_ids = [talker.tts_text_end_token_id, talker.tts_text_pad_token_id]
    ids = [*closing_ids, *(speaker.bos_token for speaker in speakers.values())]
    vocabulary = engine.model_config.get_vocab_size()
    if outside := [token for token in ids if not 0 <= token < vocabulary]:
        raise CheckpointError(
            f"speech tokens {outside} (config.json, spk_dict.pt) lie outside the vocabulary of {vocabulary}"
        )
    embeds: torch.Tensor = engine.collective_rpc("embed_tokens", args=(ids,))[0]
    return SpeechEmbeddings(voices=dict(zip(speakers, embeds[2:], strict=True)), closing=embeds[:2])
