"""Advances every active chunk by its scheduled solver steps, and makes solved ones audio.

vLLM calls a pooler after each forward pass with the requests of the batch, how many tokens each was
scheduled for and how many it has had.  Here a token is a solver step, or a piece of audio; the last solver
step makes the first piece, too.
"""

import logging
from collections.abc import Mapping, Sequence, Set
from weakref import WeakKeyDictionary

import torch
from vllm.model_executor.layers.pooler import Pooler
from vllm.pooling_params import PoolingParams
from vllm.tasks import PoolingTask
from vllm.v1.outputs import PoolerOutput
from vllm.v1.pool.metadata import PoolingCursor, PoolingMetadata, PoolingStates

from omnirelay.errors import OmniRelayError, StageFailedError
from services.token2wav.qwen2_5_omni.conditioning import Conditioner, SolverState
from services.token2wav.qwen2_5_omni.dit import DiffusionTransformer, DiTBatch
from services.token2wav.qwen2_5_omni.ode import EVALUATIONS_PER_STEP, advance
from services.token2wav.qwen2_5_omni.synthesis import CHUNK_KEY, SynthesisChunk, pack_failure, pack_waveform
from services.token2wav.qwen2_5_omni.vocoder import Vocoder

logger = logging.getLogger(__name__)


class SolverPooler(Pooler):
    """Holds the solver's state of each request for as long as vLLM holds the request's.

    The states hang on vLLM's own ``PoolingStates`` objects by weak reference: when vLLM lets go of a
    request, finished or aborted, its solver state goes with it.
    """

    def __init__(self, dit: DiffusionTransformer, vocoder: Vocoder, conditioner: Conditioner) -> None:
        super().__init__()
        # In a tuple, for the modules are the model's to register, not a second time the pooler's.
        self._modules_of_model = (dit, vocoder)
        self._conditioner = conditioner
        self._states: WeakKeyDictionary[PoolingStates, SolverState] = WeakKeyDictionary()

    @property
    def active_states(self) -> int:
        """Number of requests whose solver state is held."""
        return len(self._states)

    def get_supported_tasks(self) -> Set[PoolingTask]:
        """Only ``plugin``: the task whose parameters vLLM leaves alone."""
        return {"plugin"}

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        """Advance the batch.

        Args:
            hidden_states: of no use here; its device and dtype do for a profiling run's output.
            pooling_metadata: the batch.

        Returns:
            For each request None, or its packed result or failure, float32 [values].
        """
        cursor = pooling_metadata.get_pooling_cursor()
        chunks = [_chunk_of(params) for params in pooling_metadata.pooling_params]
        outputs: list[torch.Tensor | None] = [None] * len(chunks)
        tokens: dict[int, range] = {}
        for index, chunk in enumerate(chunks):
            end = int(cursor.seq_lens_cpu[index])
            start = end - int(cursor.num_scheduled_tokens_cpu[index])
            if chunk is None:
                # Only vLLM's profiling run: the scheduler refuses requests without a chunk.
                outputs[index] = hidden_states.new_zeros(1)
            elif self._prepare(index, chunk, start, pooling_metadata, outputs):
                tokens[index] = range(start, end)
        self._solve(tokens, pooling_metadata.pooling_states)
        for index, taken in tokens.items():
            outputs[index] = self._make_audio(index, taken, pooling_metadata)
        return outputs

    def _prepare(
        self,
        index: int,
        chunk: SynthesisChunk,
        start: int,
        metadata: PoolingMetadata,
        outputs: list[torch.Tensor | None],
    ) -> bool:
        """Prepare a request at its first step; on failure end it, and only it, at this step."""
        key = metadata.pooling_states[index]
        try:
            if start == 0:
                self._states[key] = self._conditioner.prepare(chunk)
            elif key not in self._states:
                raise StageFailedError(f"the solver's state before step {start} is gone")
        except OmniRelayError as error:
            outputs[index] = _fail(index, error, metadata.get_pooling_cursor())
        except Exception as error:
            logger.exception("a chunk could not be prepared")
            failure = StageFailedError(f"the chunk could not be prepared: {error}")
            outputs[index] = _fail(index, failure, metadata.get_pooling_cursor())
        return outputs[index] is None

    def _solve(self, tokens: Mapping[int, range], keys: Sequence[PoolingStates]) -> None:
        """Take one step after the other, each of all requests that still have one to take."""
        steps = {}
        for index, taken in tokens.items():
            state = self._states[keys[index]]
            steps[index] = [(state, step) for step in taken if step < state.chunk.steps]
        batch: DiTBatch | None = None
        size = 0
        for offset in range(max(map(len, steps.values()), default=0)):
            active = [of_one[offset] for of_one in steps.values() if offset < len(of_one)]
            if batch is None or len(active) != size:
                batch, size = self._conditioner.batch([state for state, _ in active]), len(active)
            self._step(active, batch)

    def _step(self, active: Sequence[tuple[SolverState, int]], batch: DiTBatch) -> None:
        dit, _ = self._modules_of_model

        def velocity(value: torch.Tensor, evaluation: int) -> torch.Tensor:
            done = [step * EVALUATIONS_PER_STEP + evaluation for _, step in active]
            output: torch.Tensor = dit(value, batch, done)
            return output

        mel = advance(
            velocity,
            value=torch.cat([state.mel for state, _ in active]),
            length=torch.stack([state.schedule.lengths[step] for state, step in active]),
            rows=batch.layout.source_request,
        )
        sizes = [state.mel.shape[0] for state, _ in active]
        for (state, _), advanced in zip(active, torch.split(mel, sizes), strict=True):
            state.mel = advanced

    def _make_audio(self, index: int, taken: range, metadata: PoolingMetadata) -> torch.Tensor | None:
        """Make the pieces of audio that are due; gives the whole after the last one, or a failure at once."""
        cursor, key = metadata.get_pooling_cursor(), metadata.pooling_states[index]
        state = self._states[key]
        first = state.chunk.steps - 1
        pieces = int(cursor.prompt_lens_cpu[index]) - first
        try:
            for token in taken:
                if token >= first:
                    state.audio.append(self._vocode(state, token - first, pieces))
            if len(state.audio) < pieces:
                return None
            state.leave_mel(self._modules_of_model[1].context.left)
            output = pack_waveform(torch.cat(state.audio))
        except OmniRelayError as error:
            output = _fail(index, error, cursor)
        except Exception as error:
            logger.exception("a chunk could not be made audio")
            failure = StageFailedError(f"the chunk could not be made audio: {error}")
            output = _fail(index, failure, cursor)
        del self._states[key]
        return output

    def _vocode(self, state: SolverState, piece: int, pieces: int) -> torch.Tensor:
        """Make one of so many pieces audio, float32 [samples]; of a silent chunk there are none."""
        if state.chunk.silent:
            return state.mel.new_empty(0)
        _, vocoder = self._modules_of_model
        before, target, after = state.split_mel()
        frames = target.shape[0]
        start, end = frames * piece // pieces, frames * (piece + 1) // pieces
        # Of what is more than the context on either side the vocoder takes no notice.
        left = torch.cat([before, target[max(0, start - vocoder.context.left) : start]])
        right = torch.cat([target[end : end + vocoder.context.right], after])
        waveform = vocoder(left, target[start:end], right).float()
        if not bool(torch.isfinite(waveform).all()):
            raise StageFailedError("the vocoder's waveform is not finite")
        return waveform


def _chunk_of(params: PoolingParams) -> SynthesisChunk | None:
    chunk = (params.extra_kwargs or {}).get(CHUNK_KEY)
    return chunk if isinstance(chunk, SynthesisChunk) else None


def _fail(index: int, error: OmniRelayError, cursor: PoolingCursor) -> torch.Tensor:
    """End a request early: the runner returns the output of every request that the mask says is done."""
    cursor.finished_mask[index] = True
    return pack_failure(error)
