"""What the talker computes before it is ready on a GPU, where vLLM's own trial run does not reach."""

from typing import Final

import msgspec
import torch
from vllm.inputs import tokens_input
from vllm.v1.engine.llm_engine import LLMEngine

from services.talker.family import SpeechRules
from services.talker.scheduler import TalkerScheduler
from services.talker.track import ConditioningTrack
from shared.messages import Sampling
from shared.playback import PlaybackClock
from shared.vllm.first_steps import first_steps, run_requests
from shared.vllm.sampling.generation import sampling_params, submit
from shared.vllm.tensors import pack_rows

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
