"""What a CUDA graph does, on a CPU: operators are recorded, and repeated on the tensors that they had."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.vllm.recorded import Tensors

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
