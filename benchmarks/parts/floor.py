"""What a decoding step costs beside the model: the talker's, and that of vLLM with nothing of ours in it.

``python -m benchmarks.parts.floor SERVER MODEL TOKENS`` measures one in its own process, and writes JSON.
Bare vLLM runs a language model of the talker's sizes with random weights, one request, the same sampling.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks.measure.results import Floor
from benchmarks.measure.workload import SEED, SPEAKER
from omnirelay.errors import OmniRelayError
from shared.messages import ConditioningRows, Sampling, SpeechSettings, SpeechStart

if TYPE_CHECKING:
    from shared.vllm.model_time import ModelTime

SERVERS: Final = ("vllm", "talker")
PROMPT_TOKENS: Final = 98
REPETITION_PENALTY: Final = 1.05
"""The talker's default."""
_SHAPE: Final = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
)


async def measure_floor(model: Path, tokens: int, repeats: int) -> list[Floor]:
    """Let both decode one request, in turn."""
    found = [Floor(server=server, step_ms=[], model_ms=[]) for server in SERVERS]
    for _ in range(repeats):
        for each in found:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.parts.floor", each.server, str(model), str(tokens)),
                stdout=asyncio.subprocess.PIPE,
            )
            told, _ = await process.communicate()
            if process.returncode != 0:
                raise OmniRelayError(f"steps of {each.server} could not be measured: {process.returncode}")
            measured = msgspec.json.decode(told.splitlines()[-1], type=Floor)
            each.step_ms.extend(measured.step_ms)
            each.model_ms.extend(measured.model_ms)
    return found


def main(server: str, model: Path, tokens: int) -> Floor:
    """Measure in this process; the first request is a warm-up."""
    from shared.config import TalkerConfig  # noqa: PLC0415 - the environment comes before torch
    from shared.vllm.environment import prepare_environment  # noqa: PLC0415 - as above

    prepare_environment(TalkerConfig())
    runs = _talker(model, tokens) if server == "talker" else _vllm(model, tokens)
    next(runs)
    return next(runs)


def _timed(server: str, clock: "ModelTime", step: Callable[[], object], going: Callable[[], object]) -> Floor:
    """Step until the request has ended; the first step, which computes the prompt, is left out."""
    result = Floor(server=server, step_ms=[], model_ms=[])
    step()
    while going():
        started, modelled = time.perf_counter(), clock.seconds
        step()
        result.step_ms.append(1000 * (time.perf_counter() - started))
        result.model_ms.append(1000 * (clock.seconds - modelled))
    return result


def _vllm(model: Path, tokens: int) -> Iterator[Floor]:
    from vllm import SamplingParams  # noqa: PLC0415 - the environment comes before it
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - as above
    from vllm.model_executor.models import ModelRegistry  # noqa: PLC0415 - as above
    from vllm.model_executor.models.llama import LlamaForCausalLM  # noqa: PLC0415 - as above
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415 - as above

    from shared.vllm.model_time import watch_model  # noqa: PLC0415 - as above

    # Else vLLM would inspect the class in a process that knows nothing of this environment.
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    talker = json.loads((model / "config.json").read_text(encoding="utf-8"))["talker_config"]
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
    clock = watch_model(engine)
    params = SamplingParams(
        max_tokens=tokens,
        temperature=0.0,
        repetition_penalty=REPETITION_PENALTY,
        ignore_eos=True,
        detokenize=False,
    )
    for name in ("first", "second"):
        engine.add_request(name, {"prompt_token_ids": list(range(PROMPT_TOKENS))}, params)
        yield _timed("vllm", clock, engine.step, engine.has_unfinished_requests)


def _talker(model: Path, tokens: int) -> Iterator[Floor]:
    import torch  # noqa: PLC0415 - the environment comes before it

    from services.families.known import family_of, read_config  # noqa: PLC0415 - as above
    from services.talker.service import TalkerService  # noqa: PLC0415 - as above
    from shared.config import TalkerConfig  # noqa: PLC0415 - as above
    from shared.vllm.tensors import pack_positions, pack_rows  # noqa: PLC0415 - as above

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))["talker_config"]
    sink: Any = _Sink()
    service = TalkerService(family_of(read_config(model)).talker(), model, TalkerConfig(), sink, sink)
    sampling = Sampling(max_tokens=tokens, min_tokens=tokens, repetition_penalty=REPETITION_PENALTY)
    speech = SpeechSettings(speaker=SPEAKER, sampling=sampling, seed=SEED)
    rows = torch.randn(PROMPT_TOKENS, config["embedding_size"], generator=torch.Generator().manual_seed(SEED))
    for name in ("first", "second"):
        # The talker's prompt is two positions longer than the thinker's.
        service.accept(
            SpeechStart(request_id=name, prompt_tokens=PROMPT_TOKENS - 2, priority=0, speech=speech)
        )
        service.accept(
            ConditioningRows(
                request_id=name,
                seq=0,
                start=0,
                rows=pack_rows(rows),
                additional=pack_positions(torch.zeros(3, PROMPT_TOKENS)),
                last=True,
            )
        )
        yield _timed("talker", service.model_time, service.step, service.active_requests)


class _Sink:
    """Takes the place of the queues to the gateway and to token2wav."""

    def put(self, message: Any) -> int:
        """Drop a message."""
        return 0 if message is None else 1

    def stalls(self, _: str) -> bool:
        """Keep up with everything."""
        return False


if __name__ == "__main__":
    measured = main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")
    sys.stdout.flush()
    # As a stage does: nothing depends on taking torch and vLLM down piece by piece.
    os._exit(0)
