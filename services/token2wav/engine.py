"""The token2wav engine: built from a checkpoint, fed with chunks, stepped until audio comes out."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from vllm import PoolingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import PoolingRequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import OmniRelayError
from services.token2wav.chunks import CHUNK_KEY, StreamState, SynthesisChunk
from services.token2wav.family import SynthesisFamily
from services.token2wav.scheduler import PLAYBACK_MARGIN_KEY, RECORDS_KEY, SYNTHESIS_KEY, SynthesisScheduler
from shared.config import EngineConfig, SynthesisConfig, Token2WavConfig
from shared.engine_defaults import batch_size
from shared.vllm.first_steps import first_steps
from shared.vllm.model_time import watch_model
from shared.vllm.platform import build_engine, register_model, set_float32_precision

logger = logging.getLogger(__name__)

# vLLM wants every model to look like a language model; nothing is ever computed with these.
_NOMINAL_HIDDEN_SIZE = 8
_STEP_TOKEN = 0
_NOMINAL_VOCABULARY = 2


def build_token2wav(family: SynthesisFamily, model_dir: Path, config: Token2WavConfig) -> "SynthesisEngine":
    """Build the vLLM engine of the token2wav stage in this process.

    CUDA graphs are recorded where there is CUDA, unless ``enforce_eager``; a CPU is always exact.

    Raises CheckpointError if the directory lacks a file or a tensor, or holds one that does not fit.
    """
    synthesis, batch = config.synthesis, batch_size(config.engine, current_platform.is_cpu())
    if current_platform.is_cpu():
        synthesis = synthesis.model_copy(update={"precision": "exact"})
    architecture = register_model(family.model)
    engine = build_engine(
        "token2wav",
        model_dir,
        EngineConfig(
            dtype="float32",
            max_num_seqs=batch,
            # One step of each request, or as many as fit of one that is alone.
            max_num_batched_tokens=max(batch, synthesis.time_points),
            gpu_memory_utilization=config.engine.gpu_memory_utilization,
            enforce_eager=True,
        ),
        log_stats=config.http is not None,
        runner="pooling",
        hf_overrides=lambda whole: _nominal(family, whole, architecture, synthesis),
        scheduler_cls=SynthesisScheduler,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        additional_config={
            SYNTHESIS_KEY: synthesis.model_dump(),
            PLAYBACK_MARGIN_KEY: config.playback_margin_s,
            RECORDS_KEY: current_platform.is_cuda() and not config.engine.enforce_eager,
        },
    )
    if not current_platform.is_cpu():
        set_float32_precision(synthesis.precision)
    return SynthesisEngine(engine, family, synthesis)


def _nominal(family: SynthesisFamily, whole: Any, architecture: str, synthesis: SynthesisConfig) -> Any:
    """Narrow a checkpoint's configuration to token2wav's, with what vLLM wants to know of a language model.

    vLLM calls it on its own result again, and on an empty configuration to see what it does; what is
    not token2wav's passes through and is refused by the model.
    """
    narrowed = family.config(whole)
    if narrowed is None:
        return whole
    narrowed.architectures = [architecture]
    narrowed.vocab_size = _NOMINAL_VOCABULARY
    narrowed.hidden_size = _NOMINAL_HIDDEN_SIZE
    narrowed.num_attention_heads = 1
    narrowed.num_hidden_layers = 1
    # As many tokens as a chunk can have: solver steps, and pieces of audio.
    most_frames = family.work(narrowed, synthesis).geometry.max_frames
    narrowed.max_position_embeddings = synthesis.time_points + most_frames
    return narrowed


@dataclass(frozen=True)
class ChunkOutcome:
    """How a chunk ended: exactly one of ``waveform`` (float32 [samples]) and ``error`` is set."""

    request_id: str
    waveform: torch.Tensor | None = None
    error: OmniRelayError | None = None


class SynthesisEngine:
    """The engine with vLLM's vocabulary taken off: chunks in, outcomes out.

    Not safe for threads: one loop submits, steps and aborts.
    """

    def __init__(self, engine: LLMEngine, family: SynthesisFamily, synthesis: SynthesisConfig) -> None:
        self._engine = engine
        self._in_flight: dict[str, tuple[str, StreamState]] = {}
        config = engine.model_config.hf_config
        self.model_time = watch_model(engine)
        self._work = family.work(config, synthesis)
        self.geometry = self._work.geometry
        # vLLM's client of an engine core in the same process is a thin wrapper around it.
        self.scheduler: SynthesisScheduler = engine.engine_core.engine_core.scheduler
        self.scheduler.work = self._work

    @contextmanager
    def first_steps(self) -> Iterator[None]:
        """See :func:`shared.vllm.first_steps.first_steps`."""
        with first_steps(self._engine):
            yield
        self.model_time.seconds = 0.0

    def submit_chunk(
        self, request_id: str, chunk: SynthesisChunk, priority: int = 0, suspect: bool = False
    ) -> None:
        """Queue a chunk under an id unique among those in flight; lower priorities run first.

        A ``suspect`` is computed alone.
        """
        params = PoolingParams(task="plugin", extra_kwargs={CHUNK_KEY: chunk})
        prompt = TokensPrompt(prompt_token_ids=[_STEP_TOKEN] * self._work.advances(chunk))
        name = self._engine.add_request(request_id, prompt, params, priority=priority)
        self._in_flight[request_id] = name, chunk.stream
        if suspect:
            self.scheduler.suspect(name, request_id)

    def step(self) -> list[ChunkOutcome]:
        """Advance all active chunks by a step, and return those that ended.

        Every chunk that was submitted and not aborted ends in exactly one outcome.  What goes wrong with
        the batch as a whole (the device out of memory, say) is raised as it is: then the engine's state
        is not to be trusted any more, and its process should end.
        """
        outcomes = [self._outcome(cast(PoolingRequestOutput, output)) for output in self._engine.step()]
        refused = self.scheduler.take_failures()
        for request_id, (internal_id, _) in list(self._in_flight.items()):
            if internal_id in refused:
                self.abort([request_id])
                outcomes.append(ChunkOutcome(request_id, error=refused[internal_id]))
        return outcomes

    def _outcome(self, output: PoolingRequestOutput) -> ChunkOutcome:
        error = self._in_flight.pop(output.request_id)[1].failure
        if error is None:
            return ChunkOutcome(output.request_id, waveform=output.outputs.data)
        logger.warning("chunk of request %s failed: %s: %s", output.request_id, error.code, error)
        return ChunkOutcome(output.request_id, error=error)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop chunks; they have no outcome.  Ids that are not in flight are ignored.

        The chunks' states are released at the next :meth:`step`, which :attr:`has_work` asks for.
        """
        found = [self._in_flight.pop(each)[0] for each in request_ids if each in self._in_flight]
        if found:
            self._engine.abort_request(found, internal=True)

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return self._engine.has_unfinished_requests() or self.scheduler.has_requests()

    @property
    def in_flight(self) -> int:
        """Number of chunks submitted and not ended."""
        return len(self._in_flight)
