"""Finds where a step makes the host wait for its device, on a machine that has none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.vllm import transfer
from tests.support.recorder import WAITING, flat


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
