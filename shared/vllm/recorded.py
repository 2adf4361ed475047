"""Functions of tensors that are computed once and then repeated, by CUDA graphs: one for each size of inputs.

What is recorded computes on tensors that stay where they are; a call copies its inputs there, repeats the
record, and copies what came out.
"""

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeAlias

import torch

Tensors: TypeAlias = tuple[torch.Tensor, ...]
_MOST_RECORDS: Final = 128
logger = logging.getLogger(__name__)


class Record(Protocol):
    """Computes something and keeps how."""

    def __call__(self, compute: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors]:
        """Gives what computes it again, on the same tensors, and what it then writes its results to."""


class CudaGraphs:
    """A :class:`Record` by CUDA graphs, which share their memory: results last until the next is repeated."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors]:
        """See :class:`Record`."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Libraries load kernels and take memory at the first call, which no graph may hold.
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = compute()
        self._pool = graph.pool()
        return graph.replay, results


class _Place:
    """Memory that stays where it is, for one input; those of all sizes share it."""

    def __init__(self, size: int, like: torch.Tensor) -> None:
        self.memory = torch.empty(size, dtype=like.dtype, device=like.device)
        self._held: Callable[[], torch.Tensor | None] = lambda: None

    def hold(self, tensor: torch.Tensor) -> None:
        """Copy an input here, unless it is the one copied last."""
        if self._held() is not tensor:
            self.memory[: tensor.numel()].view(tensor.shape).copy_(tensor)
            self._held = weakref.ref(tensor)


class Recorded:
    """A function of tensors, and of tuples of them, which nobody changes in place between two calls.

    The function must do the same whatever its inputs hold.  Sizes beyond the first 128 are computed without a
    record, and all are once a record failed.
    """

    def __init__(self, function: Callable[..., Tensors], record: Record) -> None:
        self._function = function
        self._record = record
        self._places: dict[int, _Place] = {}
        self._records: dict[Any, tuple[list[_Place], Callable[[], object], Tensors]] = {}
        self._most = _MOST_RECORDS

    @property
    def sizes(self) -> int:
        """Number of sizes that have been recorded."""
        return len(self._records)

    def __call__(self, *inputs: Any) -> Tensors:
        """Compute it."""
        tensors = list(_tensors(inputs))
        key = tuple((each.shape, each.dtype) for each in tensors)
        if key not in self._records and len(self._records) < self._most:
            try:
                self._records[key] = self._make(inputs, tensors)
            except RuntimeError:
                logger.warning("no CUDA graph can be made; what it was for is slower", exc_info=True)
                self._most = 0
        if key not in self._records:
            return self._function(*inputs)
        places, repeat, results = self._records[key]
        for place, tensor in zip(places, tensors, strict=True):
            place.hold(tensor)
        repeat()
        return tuple(each.clone() for each in results)

    def _make(
        self, inputs: Any, tensors: list[torch.Tensor]
    ) -> tuple[list[_Place], Callable[[], object], Tensors]:
        for number, each in enumerate(tensors):
            place = self._places.get(number)
            if place is None or place.memory.numel() < each.numel():
                self._places[number] = _Place(each.numel(), each)
        places = [self._places[number] for number in range(len(tensors))]
        for place, tensor in zip(places, tensors, strict=True):
            place.hold(tensor)
        there = iter(
            [
                place.memory[: tensor.numel()].view(tensor.shape)
                for place, tensor in zip(places, tensors, strict=True)
            ]
        )
        fixed = _like(inputs, there)
        return places, *self._record(lambda: self._function(*fixed))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of nested tuples, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for each in value:
            yield from _tensors(each)


def _like(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The same nested tuples, of other tensors."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    parts = [_like(each, tensors) for each in value]
    return value._make(parts) if hasattr(value, "_make") else tuple(parts)
