"""Copies between the host and a GPU for which nobody waits; on a CPU there is nothing to copy.

A copy from or to ordinary memory stops the host until the GPU has come to it.  From or to pinned memory it
is put behind the work that was handed over before, and the host goes on.
"""

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on a device, without waiting; the device's next work finds it there."""
    if device.type == "cpu":
        return tensor
    pinned = tensor if tensor.is_pinned() else _pinned(tensor).copy_(tensor)
    return pinned.to(device, non_blocking=True)


def all_to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Small host tensors of whole numbers or truth values on a device, by a single copy."""
    if device.type == "cpu":
        return list(tensors)
    packed = to_device(torch.cat([each.flatten().to(torch.int64) for each in tensors]), device)
    parts = packed.split([each.numel() for each in tensors])
    return [part.view(each.shape).to(each.dtype) for part, each in zip(parts, tensors, strict=True)]


class HostCopy:
    """Tensors of one device on their way to the host."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        device = tensors[0].device
        if device.type == "cpu":
            self._tensors = tensors
            return
        # PyTorch's allocator of pinned memory gives none of it out again before the copies are done.
        self._tensors = tuple(_pinned(each).copy_(each, non_blocking=True) for each in tensors)
        self._event = torch.Event(device)
        self._event.record()

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the host.

        Nothing is waited for if something that was handed over later is done: sampled tokens, say.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
