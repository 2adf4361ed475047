"""A synthesizer as a vLLM pooling model without attention layers of vLLM's, hence without a KV cache."""

import logging
from collections.abc import Callable, Iterable, Set
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import Pooler
from vllm.model_executor.models.interfaces import IsAttentionFree
from vllm.model_executor.models.interfaces_base import attn_type
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.tasks import PoolingTask
from vllm.v1.outputs import PoolerOutput
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from omnirelay.errors import CheckpointError, OmniRelayError, StageFailedError
from services.token2wav.chunks import CHUNK_KEY, SynthesisChunk
from services.token2wav.family import Synthesizer

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
        """Advance the batch; gives each request None, or its samples, float32, one if it failed.

        ``hidden_states`` serve only for the device and dtype of a profiling run's output.
        """
        cursor, keys = pooling_metadata.get_pooling_cursor(), pooling_metadata.pooling_states
        extras = [params.extra_kwargs or {} for params in pooling_metadata.pooling_params]
        chunks: list[Any] = [extra.get(CHUNK_KEY) for extra in extras]
        outputs: list[torch.Tensor | None] = [None] * len(chunks)
        tokens: dict[int, range] = {}
        for index, chunk in enumerate(chunks):
            end = int(cursor.seq_lens_cpu[index])
            start = end - int(cursor.num_scheduled_tokens_cpu[index])
            if not isinstance(chunk, SynthesisChunk):
                # Only vLLM's profiling run.
                outputs[index] = hidden_states.new_zeros(1)
            else:
                _alone(chunk, partial(self._prepare, keys[index], chunk, start), "prepared")
                tokens[index] = range(start, end)
        ready = {index: taken for index, taken in tokens.items() if chunks[index].stream.failure is None}
        states = [self._states[keys[index]] for index in ready]
        self.synthesizer.advance(states, list(ready.values()))
        for index, output in zip(
            ready, self._outputs_of([chunks[each] for each in ready], states), strict=True
        ):
            outputs[index] = output
        for index in tokens:
            if chunks[index].stream.failure is not None:
                outputs[index] = hidden_states.new_zeros(1)
            if outputs[index] is not None:
                self._states.pop(keys[index], None)
                # The runner returns the output of every request that the mask says is done.
                cursor.finished_mask[index] = True
        return outputs

    def _outputs_of(self, chunks: list[SynthesisChunk], states: list[Any]) -> list[torch.Tensor | None]:
        """The samples of each chunk that was just advanced; None while it has more to do, or if it failed."""
        outputs = [
            _alone(chunk, partial(self.synthesizer.finished, state), "made audio")
            for chunk, state in zip(chunks, states, strict=True)
        ]
        made = [(chunk, output) for chunk, output in zip(chunks, outputs, strict=True) if output is not None]
        for (chunk, _), is_finite in zip(made, _are_finite([each for _, each in made]), strict=True):
            if not is_finite:
                chunk.stream.failure = NOT_FINITE
        return outputs

    def _prepare(self, key: PoolingStates, chunk: SynthesisChunk, start: int) -> None:
        """Prepare a chunk before its first advance."""
        if start == 0:
            self._states[key] = self.synthesizer.prepare(chunk)
        elif key not in self._states:
            raise StageFailedError(f"the chunk's state before step {start} is gone")


def _are_finite(waveforms: list[Any]) -> list[bool]:
    """Whether each is finite; a device is waited for once."""
    if not waveforms:
        return []
    return torch.stack([torch.isfinite(waveform).all() for waveform in waveforms]).tolist()


def _alone(chunk: SynthesisChunk, work: Callable[[], T], what: str) -> T | None:
    """Do something for one chunk alone; notes what goes wrong in its stream."""
    try:
        return work()
    except OmniRelayError as error:
        chunk.stream.failure = error
    except Exception as error:
        logger.exception("a chunk could not be %s", what)
        chunk.stream.failure = StageFailedError(f"the chunk could not be {what}: {error}")
    return None


@attn_type("attention_free")
class SynthesisModel(nn.Module, IsAttentionFree):
    """Base class of models that make audio: a family sets the synthesizer, and names its weights.

    Its tokens, advances of chunks, carry nothing: ``forward`` returns zeros, the work is the pooler's.
    """

    is_pooling_model = True
    hf_to_vllm_mapper: ClassVar[WeightsMapper]
    computed: ClassVar[list[str]] = []
    """Ends of the names of tensors that a checkpoint may hold, and that are computed here."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        del prefix
        self.directory: Final = Path(vllm_config.model_config.model)
        self._hidden_size = vllm_config.model_config.get_hidden_size()

    def synthesize_with(self, synthesizer: Synthesizer) -> None:
        """Set what makes the audio."""
        self.pooler = SynthesisPooler(synthesizer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load token2wav's tensors; raises CheckpointError at one missing, unknown, or of another shape."""
        loader = AutoWeightsLoader(self, ignore_unexpected_suffixes=self.computed)
        try:
            loaded: set[str] = loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)
        except (ValueError, AssertionError, RuntimeError) as error:
            raise CheckpointError(f"{self.directory}: token2wav: {error}") from error
        if missing := sorted(name for name, _ in self.named_parameters() if name not in loaded):
            named = {
                ours: theirs for theirs, ours in self.hf_to_vllm_mapper.orig_to_new_prefix.items() if ours
            }
            ours = next(each for each in named if missing[0].startswith(each))
            raise CheckpointError(
                f"{self.directory}: {len(missing)} tensors are missing, "
                f"the first is {named[ours]}{missing[0].removeprefix(ours)}"
            )
        return loaded

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
