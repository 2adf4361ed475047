"""A synthesizer as a vLLM pooling model without attention layers of vLLM's, hence without a KV cache."""

import logging
from collections.abc import Callable, Set
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import Pooler
from vllm.model_executor.models.interfaces import IsAttentionFree
from vllm.model_executor.models.interfaces_base import attn_type
from vllm.tasks import PoolingTask
from vllm.v1.outputs import PoolerOutput
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from omnirelay.errors import OmniRelayError, StageFailedError
from services.token2wav.family import Synthesizer
from services.token2wav.synthesis import CHUNK_KEY, SynthesisChunk, pack_failure, pack_waveform

T = TypeVar("T")
NOT_FINITE: Final = StageFailedError("the waveform is not finite")
logger = logging.getLogger(__name__)


class SynthesisPooler(Pooler):
    """Holds the state of each chunk for as long as vLLM holds its request.

    The states hang on vLLM's own ``PoolingStates`` objects by weak reference: when vLLM lets go of a
    request, finished or aborted, its state goes with it.
    """

    def __init__(self, synthesizer: Synthesizer) -> None:
        super().__init__()
        # In a tuple, for its modules are the model's to register, not a second time the pooler's.
        self._of_model = (synthesizer,)
        self._states: WeakKeyDictionary[PoolingStates, Any] = WeakKeyDictionary()

    @property
    def synthesizer(self) -> Synthesizer:
        """What makes the audio."""
        return self._of_model[0]

    @property
    def active_states(self) -> int:
        """Number of requests whose state is held."""
        return len(self._states)

    def get_supported_tasks(self) -> Set[PoolingTask]:
        """Only ``plugin``: the task whose parameters vLLM leaves alone."""
        return {"plugin"}

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        """Advance the batch; gives each request None, or its packed result or failure, float32 [values].

        ``hidden_states`` serve only for the device and dtype of a profiling run's output.
        """
        cursor, keys = pooling_metadata.get_pooling_cursor(), pooling_metadata.pooling_states
        extras = [params.extra_kwargs or {} for params in pooling_metadata.pooling_params]
        chunks = [extra.get(CHUNK_KEY) for extra in extras]
        outputs: list[torch.Tensor | None] = [None] * len(chunks)
        tokens: dict[int, range] = {}
        for index, chunk in enumerate(chunks):
            end = int(cursor.seq_lens_cpu[index])
            start = end - int(cursor.num_scheduled_tokens_cpu[index])
            if not isinstance(chunk, SynthesisChunk):
                # Only vLLM's profiling run: the scheduler refuses requests without a chunk.
                outputs[index] = hidden_states.new_zeros(1)
            else:
                _, outputs[index] = _alone(partial(self._prepare, keys[index], chunk, start), "prepared")
            if outputs[index] is None:
                tokens[index] = range(start, end)
        states = [self._states[keys[index]] for index in tokens]
        self.synthesizer.advance(states, list(tokens.values()))
        for index, output in zip(tokens, self._outputs_of(states), strict=True):
            outputs[index] = output
            if output is not None:
                del self._states[keys[index]]
        for index, output in enumerate(outputs):
            if output is not None and isinstance(chunks[index], SynthesisChunk):
                # The runner returns the output of every request that the mask says is done.
                cursor.finished_mask[index] = True
        return outputs

    def _outputs_of(self, states: list[Any]) -> list[torch.Tensor | None]:
        """The packed result or failure of each chunk that was just advanced; None while it has more to do."""
        ends = [_alone(partial(self.synthesizer.finished, state), "made audio") for state in states]
        finite = iter(_are_finite([samples for samples, _ in ends if samples is not None]))
        return [
            failure
            if samples is None
            else pack_waveform(samples)
            if next(finite)
            else pack_failure(NOT_FINITE)
            for samples, failure in ends
        ]

    def _prepare(self, key: PoolingStates, chunk: SynthesisChunk, start: int) -> None:
        """Prepare a chunk before its first advance."""
        if start == 0:
            self._states[key] = self.synthesizer.prepare(chunk)
        elif key not in self._states:
            raise StageFailedError(f"the chunk's state before step {start} is gone")


def _are_finite(waveforms: list[torch.Tensor]) -> list[bool]:
    """Whether each is finite; a device is waited for once."""
    if not waveforms:
        return []
    return torch.stack([torch.isfinite(waveform).all() for waveform in waveforms]).tolist()


def _alone(work: Callable[[], T], what: str) -> tuple[T | None, torch.Tensor | None]:
    """Do something for one chunk alone; gives its result, or else the packed failure."""
    try:
        return work(), None
    except OmniRelayError as error:
        return None, pack_failure(error)
    except Exception as error:
        logger.exception("a chunk could not be %s", what)
        return None, pack_failure(StageFailedError(f"the chunk could not be {what}: {error}"))


@attn_type("attention_free")
class SynthesisModel(nn.Module, IsAttentionFree):
    """Base class of models that make audio: a family sets the synthesizer, and loads weights.

    Its tokens, advances of chunks, carry nothing: ``forward`` returns zeros, the work is the pooler's.
    """

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        del prefix
        self._hidden_size = vllm_config.model_config.get_hidden_size()

    def synthesize_with(self, synthesizer: Synthesizer) -> None:
        """Set what makes the audio."""
        self.pooler = SynthesisPooler(synthesizer)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> zeros, float32 [tokens, hidden]."""
        return torch.zeros(input_ids.shape[0], self._hidden_size, device=input_ids.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return zeros, float32 [tokens, hidden]: see the class."""
        del input_ids, intermediate_tensors, inputs_embeds
        return torch.zeros(positions.shape[-1], self._hidden_size, device=positions.device)
