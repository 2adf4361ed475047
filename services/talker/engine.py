"""The talker's vLLM engine: how it is made, and what it computes before the stage is ready."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from services.talker.family import SpeechRules, TalkerFamily
from services.talker.scheduler import TalkerScheduler
from services.talker.track import ConditioningTrack
from shared.config import TalkerConfig
from shared.messages import SAMPLE_RATE, Sampling
from shared.playback import PlaybackClock
from shared.vllm.first_steps import first_steps, run_requests
from shared.vllm.generating import PLAYBACK_MARGIN_KEY
from shared.vllm.platform import build_engine, register_model
from shared.vllm.sampling.drawing import DrawProcessor
from shared.vllm.sampling.generation import sampling_params, submit
from shared.vllm.sampling.repetition import RepetitionProcessor
from shared.vllm.tensors import pack_rows


def build_talker(family: TalkerFamily, model: Path, config: TalkerConfig) -> tuple[LLMEngine, SpeechRules]:
    """Make the engine for the checkpoint in a directory; gives it and how the checkpoint speaks."""
    architecture = register_model(family.model)
    engine = build_engine(
        "talker",
        model,
        config.engine,
        log_stats=config.http is not None,
        # Workers are processes: it is pickled.
        hf_overrides=partial(_narrowed, family.config, architecture),
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


def _narrowed(config_of: Callable[[Any], Any], architecture: str, whole: Any) -> Any:
    config = config_of(whole)
    config.architectures = [architecture]
    return config


_FRAMES: Final = 4
_POSITIONS: Final = 32
_AT_ONCE: Final = (1, 2, 8)


def warm_up(engine: LLMEngine, rules: SpeechRules) -> None:
    """Speak silence, one reply alone and several at once, drawn as by default and greedily; forget them.

    Raises StageStartError if one failed.
    """
    defaults = msgspec.structs.asdict(rules.codec.defaults)
    drawn = Sampling(max_tokens=_FRAMES, min_tokens=_FRAMES, **defaults)
    greedy = Sampling(max_tokens=_FRAMES, min_tokens=_FRAMES)
    with first_steps(engine):
        for count in _AT_ONCE:
            for number in range(count):
                _submit(engine, rules, f"warm-up {number}", greedy if number % 2 else drawn)
            for _ in run_requests(engine):
                pass


def _submit(engine: LLMEngine, rules: SpeechRules, name: str, sampling: Sampling) -> None:
    scheduler: TalkerScheduler = engine.engine_core.engine_core.scheduler
    room = engine.model_config.max_model_len - _POSITIONS
    params = sampling_params(sampling, stage="talker", seed=0, stop_token_ids=rules.end_tokens, room=room)
    dtype = engine.model_config.dtype
    track = ConditioningTrack(_POSITIONS, rules.row_width, dtype, rules.codec.groups)
    rows = torch.zeros(_POSITIONS, rules.row_width, dtype=dtype)
    track.append(pack_rows(rows), torch.arange(_POSITIONS).expand(3, -1), last=True)
    # What the tokens are does not matter: each has an embedding.
    prompt = tokens_input(rules.end_tokens[:1] * _POSITIONS)
    engine_id = submit(engine, name, prompt, params, priority=0)
    scheduler.attach(engine_id, PlaybackClock(streaming=False))
    scheduler.condition(engine_id, track)
