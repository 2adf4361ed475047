"""Stages without a stack: ``python -m benchmarks.scenarios.alone PART MODEL ARGUMENT…`` measures one.

``synthesis`` is token2wav on streams of different lengths.  ``talker`` and ``vllm`` are decoding steps of one
request: the talker's, and those of vLLM with nothing of ours in it, a language model of the same sizes.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.measure.machine import forget_peak, peak_memory
from benchmarks.measure.process import answer, in_process
from benchmarks.measure.results import Measured
from benchmarks.measure.stage import finish, service_of
from benchmarks.measure.workload import SEED, SPEAKER
from shared.checkpoints import read_config
from shared.messages import (
    SAMPLE_RATE,
    CodecTokens,
    ConditioningRows,
    Sampling,
    SpeechSettings,
    SpeechStart,
    SynthesisStart,
)

SECONDS, COST, MEMORY = "s", "s of a second", "peak memory, MiB"
STEP, MODEL, BESIDE, PREDICTOR = "step, ms", "its model, ms", "beside the model, ms", "its code predictor, ms"
CODES: Final = 8192
"""Ids below are codes in every checkpoint of ours."""
PROMPT_TOKENS: Final = 98
_SHAPE: Final = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
)


def measure_synthesis(model: Path, lengths: Sequence[float], repeats: int) -> list[Measured]:
    """Make speech of each length, all of whose codec tokens are there."""
    return in_process(list[Measured], __name__, "synthesis", model, repeats, *lengths)


def measure_floor(model: Path, tokens: int, repeats: int) -> list[Measured]:
    """Let vLLM and the talker decode one request, in turn."""
    found = [Measured(server, {}) for server in ("vllm", "talker")]
    for _ in range(repeats):
        for each in found:
            for figure, values in in_process(Measured, __name__, each.name, model, tokens).values.items():
                each.values.setdefault(figure, []).extend(values)
    return found


def _synthesis(model: Path, repeats: str, *lengths: str) -> list[Measured]:
    service, _ = service_of("token2wav", model)
    _speak(service, 1.0, "warm-up")
    rows = []
    for length in map(float, lengths):
        forget_peak(os.getpid())
        seconds = [_speak(service, length, f"{length}/{repeat}") for repeat in range(int(repeats))]
        costs, memory = [each / length for each in seconds], [peak_memory(os.getpid()) / 2**20]
        rows.append(Measured(f"{length:g} s", {SECONDS: seconds, COST: costs, MEMORY: memory}))
    return rows


def _speak(service: Any, length: float, name: str) -> float:
    """Make one stream; gives the seconds it took."""
    geometry = service._engine.geometry
    generator = random.Random(name)  # noqa: S311 - nothing secret
    count = round(length * SAMPLE_RATE / geometry.frame_samples) * geometry.groups
    codes = [generator.randrange(min(CODES, geometry.ids)) for _ in range(count)]
    # The same work in every run; by the clock, cuts depend on how fast the machine is.
    frames = [geometry.codes_per_block * blocks for blocks in (1, 2, 4, 8)]
    sampling = Sampling(max_tokens=len(codes))
    speech = SpeechSettings(
        speaker=service.limits.speakers[0], sampling=sampling, seed=SEED, chunk_frames=frames
    )
    started = time.perf_counter()
    service.accept(SynthesisStart(request_id=name, priority=0, speech=speech))
    service.accept(CodecTokens(request_id=name, seq=0, token_ids=codes, last=True))
    finish(service)
    return time.perf_counter() - started


def _floor(server: str, model: Path, tokens: str) -> Measured:
    """Two requests, the first of which is a warm-up."""
    runs = _talker(model, int(tokens)) if server == "talker" else _vllm(model, int(tokens))
    for clock, predictor, step, going in runs:
        values: dict[str, list[float]] = {STEP: [], MODEL: [], PREDICTOR: [], BESIDE: []}
        # It computes the prompt.
        step()
        while going():
            started, modelled, completed = time.perf_counter(), clock.seconds, predictor.seconds
            step()
            step_ms, model_ms = 1000 * (time.perf_counter() - started), 1000 * (clock.seconds - modelled)
            predictor_ms = 1000 * (predictor.seconds - completed)
            for figure, value in zip(
                values, (step_ms, model_ms, predictor_ms, step_ms - model_ms), strict=True
            ):
                values[figure].append(value)
    return Measured(server, {figure: each for figure, each in values.items() if any(each)})


def _vllm(model: Path, tokens: int) -> Iterator[tuple[Any, Any, Any, Any]]:
    from shared.config import TalkerConfig  # noqa: PLC0415 - the environment comes before vLLM
    from shared.vllm.environment import prepare_environment  # noqa: PLC0415 - as above

    prepare_environment(TalkerConfig())
    from vllm import SamplingParams  # noqa: PLC0415 - as above
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - as above
    from vllm.model_executor.models import ModelRegistry  # noqa: PLC0415 - as above
    from vllm.model_executor.models.llama import LlamaForCausalLM  # noqa: PLC0415 - as above
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415 - as above

    from shared.vllm.model_time import ModelTime, watch_model  # noqa: PLC0415 - as above

    # Else vLLM would inspect the class in a process that knows nothing of this environment.
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    talker = read_config(model)["talker_config"]
    talker = talker.get("text_config", talker)
    with tempfile.TemporaryDirectory() as directory:
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        config |= {name: talker[name] for name in _SHAPE}
        Path(directory, "config.json").write_text(json.dumps(config), encoding="utf-8")
        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=directory,
                load_format="dummy",
                dtype="float32",
                max_model_len=4096,
                max_num_seqs=16,
                kv_cache_memory_bytes=256 * 2**20,
                enforce_eager=True,
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                async_scheduling=False,
                disable_log_stats=False,
            )
        )
    # The talker's default penalty.
    greedy = {"temperature": 0.0, "repetition_penalty": 1.05, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(max_tokens=tokens, **greedy)
    clock = watch_model(engine)
    for name in ("first", "second"):
        engine.add_request(name, {"prompt_token_ids": list(range(PROMPT_TOKENS))}, params)
        yield clock, ModelTime(), engine.step, engine.has_unfinished_requests


def _talker(model: Path, tokens: int) -> Iterator[tuple[Any, Any, Any, Any]]:
    service, _ = service_of("talker", model)
    import torch  # noqa: PLC0415 - the environment comes before it

    from shared.vllm.model_time import ModelTime  # noqa: PLC0415 - as above
    from shared.vllm.tensors import pack_positions, pack_rows  # noqa: PLC0415 - as above

    rules, predictor = service._rules, ModelTime()
    talker = service._engine.model_executor.driver_worker.worker.model_runner.get_model()
    if hasattr(talker, "code_predictor"):
        predictor.watch(talker.code_predictor)
    sampling = Sampling(max_tokens=tokens, min_tokens=tokens, repetition_penalty=1.05)
    speech = SpeechSettings(speaker=SPEAKER, sampling=sampling, seed=SEED)
    rows = torch.randn(PROMPT_TOKENS, rules.row_width, generator=torch.Generator().manual_seed(SEED))
    packed, positions = pack_rows(rows), pack_positions(torch.zeros(3, PROMPT_TOKENS))
    for name in ("first", "second"):
        # The talker's prompt is some positions longer than the thinker's.
        prompt_tokens = PROMPT_TOKENS - rules.codec.start_positions
        service.accept(SpeechStart(request_id=name, prompt_tokens=prompt_tokens, priority=0, speech=speech))
        service.accept(
            ConditioningRows(request_id=name, seq=0, start=0, rows=packed, additional=positions, last=True)
        )
        yield service.model_time, predictor, service.step, service.active_requests


if __name__ == "__main__":
    part, directory, *given = sys.argv[1:]
    answer((_synthesis if part == "synthesis" else partial(_floor, part))(Path(directory), *given))
