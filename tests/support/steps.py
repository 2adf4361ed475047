"""What steps do: their requests, and who draws; operators as on GPUs - recorded, compiled, never waiting."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.logits_processor import BatchUpdate

from shared.messages import StageName
from shared.vllm import transfer
from shared.vllm.recorded import Tensors
from shared.vllm.sampling.drawing import DrawProcessor, draw_here
from shared.vllm.sampling.seeds import go_on_drawing


class StepRecord:
    """Notes the scheduled tokens and the preemptions of a scheduler's requests, by the client's name.

    Attributes:
        scheduled: Tokens per request, one entry a step.
        preemptions: How often each request was preempted.
        blocks: Blocks of the KV cache that were free when the record was made.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.scheduled: list[dict[str, int]] = []
        self.preemptions: Counter[str] = Counter()
        self.blocks = self.free_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks of the KV cache that no living request holds."""
        count: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return count

    @contextmanager
    def watch(self, name_of: Callable[[str], str]) -> Iterator[None]:
        """Record the step made in this context; ``name_of`` gives the client's name for the engine's."""
        schedule = self._scheduler.schedule

        def note(*arguments: Any) -> Any:
            output = schedule(*arguments)
            counts = output.num_scheduled_tokens
            self.scheduled.append({name_of(engine_id): count for engine_id, count in counts.items()})
            for engine_id, request in self._scheduler.requests.items():
                if request.num_preemptions:
                    self.preemptions[name_of(engine_id)] = request.num_preemptions
            return output

        with mock.patch.object(self._scheduler, "schedule", note):
            yield

    def of(self, request_id: str) -> list[int]:
        """Tokens that were scheduled of one request, in the steps in which some were."""
        return [step[request_id] for step in self.scheduled if request_id in step]


WAITING = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_pinned",
    "lift_fresh",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique",
    "unique_consecutive",
    "_unique2",
}
"""Operators that wait for a device, give shapes that depend on what tensors hold, or copy from the host."""


class Recorder(TorchDispatchMode):
    """Records operators; refuses those for which a host would wait for its device, or copy to it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = [each for each in flat((args, kwargs)) if isinstance(each, torch.Tensor)]
        if name in WAITING or (name == "index" and any(each.dtype == torch.bool for each in given[1:])):
            raise AssertionError(f"{func} within a step")
        result = func(*args, **(kwargs or {}))
        given += [each for each in flat(result) if isinstance(each, torch.Tensor)]
        if len({each.device.type for each in given if each.ndim}) > 1:
            raise AssertionError(f"{func} copies between devices within a step")
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def repeat(self) -> None:
        """Compute everything again, on the tensors of the first time."""
        for func, args, kwargs, result in self.calls:
            if func._schema.is_mutable:
                func(*args, **kwargs)
            elif not any(each.alias_info for each in func._schema.returns):
                for old, new in zip(flat(result), flat(func(*args, **kwargs)), strict=True):
                    old.copy_(new)


def record(compute: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors]:
    """See :class:`shared.vllm.recorded.Record`."""
    recorder = Recorder()
    with recorder:
        results = compute()
    return recorder.repeat, results


def flat(value: Any) -> list[Any]:
    """All that nested sequences and mappings hold."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for each in value for leaf in flat(each)] if isinstance(value, list | tuple) else [value]


class StepLint(TorchDispatchMode):
    """Refuses operators that wait for a device, and copies to it from memory that is not pinned.

    Args:
        device: What takes the device's place.  ``meta`` has no values, so all that would read some fails, and
            copies are seen.  Where values are needed it is the CPU, and of copies constants alone are seen.

    Attributes:
        count: Operators that were seen on the device.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._pinned: list[torch.Tensor] = []
        self.count = 0

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """What takes the place of pinned memory; it is kept, so that no other has its address."""
        self._pinned.append(torch.empty(like.shape, dtype=like.dtype))
        return self._pinned[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = [each for each in flat((args, kwargs)) if isinstance(each, torch.Tensor)]
        there = [each for each in given if each.device.type == self._device]
        by_mask = name in ("index", "index_put_") and any(each.dtype == torch.bool for each in given[1:])
        if there and (name in WAITING or by_mask):
            raise AssertionError(f"{func} within a step")
        result = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            self._check_copy(func, given, result, (kwargs or {}).get("non_blocking") or args[2:] == (True,))
        made = [each for each in flat(result) if isinstance(each, torch.Tensor)]
        self.count += any(each.device.type == self._device for each in (*there, *made))
        return result

    def _check_copy(self, func: Any, given: list[torch.Tensor], result: torch.Tensor, free: bool) -> None:
        source = given[-1]
        if source.device == result.device:
            return
        known = {each.data_ptr() for each in self._pinned}
        if not free or (source.device.type == "cpu" and source.data_ptr() not in known):
            raise AssertionError(f"{func} copies within a step and waits for it")


@contextmanager
def step_of(device: str) -> Iterator[StepLint]:
    """A step on a device: see :class:`StepLint`."""
    lint = StepLint(device)
    with lint, mock.patch.object(transfer, "_pinned", lint.pinned):
        yield lint


@contextmanager
def linted(model: Any) -> Iterator[list[int]]:
    """Lint each forward pass of a model on a CPU in this context; gives how many operators each had."""
    counts: list[int] = []
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with step_of("cpu") as lint:
            output = forward(*args, **kwargs)
        counts.append(lint.count)
        return output

    with mock.patch.object(model, "forward", watched):
        yield counts


@contextmanager
def compiled(decoder: Any) -> Iterator[list[Any]]:
    """Compile a decoder for the steps in this context; gives the graphs that were made, one a compilation.

    What breaks a graph raises.  As on GPUs, attention is one operator that is not looked into.
    """
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    layers = [each for each in decoder.modules() if isinstance(each, Attention)]
    assert layers
    made = torch.compile(decoder.forward, backend=backend, fullgraph=True, dynamic=True)
    with (
        mock.patch.object(decoder, "forward", made),
        _opaque(layers),
        # Workers on a CPU compile nothing.
        torch.compiler.set_stance("default"),
    ):
        yield graphs
    torch._dynamo.reset()


class SchemaLint(TorchDispatchMode):
    """Refuses operators that write to what their schemas do not say, by which compilers move them.

    Attributes:
        written: Those that write to what they say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        before = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        told = {each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write}
        changed = {
            name for name, old in before.items() if not torch.allclose(given[name], old, 0, 0, equal_nan=True)
        }
        assert changed <= told, f"{func} writes to {changed - told}"
        if changed:
            self.written.add(func._schema.name)
        return result


@contextmanager
def declared(decoder: Any) -> Iterator[SchemaLint]:
    """Lint each forward pass of a decoder in this context; attention is an operator, as on GPUs."""
    lint, forward = SchemaLint(), decoder.forward

    def checked(*args: Any, **kwargs: Any) -> Any:
        with lint:
            return forward(*args, **kwargs)

    layers = [each for each in decoder.modules() if isinstance(each, Attention)]
    with mock.patch.object(decoder, "forward", checked), _opaque(layers):
        yield lint


@contextmanager
def _opaque(layers: list[Any]) -> Iterator[None]:
    for each in layers:
        each.use_direct_call = False
    try:
        yield
    finally:
        for each in layers:
            each.use_direct_call = True


def params_of(
    *, seed: int = 0, made: int = 0, stage: StageName = "thinker", **sampling: Any
) -> SamplingParams:
    """The parameters of a request."""
    asked = SamplingParams(**({"temperature": 1.0} | sampling))
    return go_on_drawing(draw_here(asked), stage, seed, made)


def processor() -> DrawProcessor:
    """One without requests."""
    return DrawProcessor(None, torch.device("cpu"), False)


class Batch:
    """Requests that draw together."""

    def __init__(self, requests: list[SamplingParams]) -> None:
        self.output: list[list[int]] = [[] for _ in requests]
        self._processor = processor()
        added = [(row, each, None, self.output[row]) for row, each in enumerate(requests)]
        self._processor.update_state(BatchUpdate(len(requests), removed=[], added=added, moved=[]))

    def draw(self, logits: torch.Tensor, keep: bool = True) -> list[int]:
        """The next token of each request; float32 ``[requests, vocabulary]``."""
        left = self._processor.apply(logits.clone())
        assert (torch.isfinite(left).sum(dim=1) == 1).all()
        tokens: list[int] = left.argmax(dim=1).tolist()
        if keep:
            for output, token in zip(self.output, tokens, strict=True):
                output.append(token)
        return tokens
