"""Tensors to message payloads and back, byte for byte: nothing is converted on the way."""

from typing import Final

import numpy as np
import torch

from omnirelay.errors import PayloadError
from shared.messages.payloads import (
    AdditionalInformationEntry,
    AdditionalInformationPayload,
    Blob,
    PromptEmbedsPayload,
)

POSITIONS: Final = "mrope_positions"
DTYPE_NAMES: Final = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
}
TORCH_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def to_blob(tensor: torch.Tensor) -> Blob:
    """The bytes of a CPU tensor, shared and not copied if it is contiguous.

    numpy knows no bfloat16, so the bytes are seen as uint8.
    """
    flat = tensor.detach().contiguous().view(-1)
    return Blob(flat.view(torch.uint8).numpy().data)


def from_blob(data: Blob, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of its own with the bytes of a checked payload."""
    tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    _copy(data, tensor)
    return tensor


def copy_rows(payload: PromptEmbedsPayload, into: torch.Tensor) -> None:
    """Copy a payload's rows, whose fit was checked, to a contiguous CPU tensor of their shape and dtype."""
    _copy(payload.data, into)


def _copy(data: Blob, into: torch.Tensor) -> None:
    if data.nbytes:
        np.copyto(into.view(-1).view(torch.uint8).numpy(), np.frombuffer(data.view, dtype=np.uint8))


def pack_rows(rows: torch.Tensor) -> PromptEmbedsPayload:
    """Rows ``[n, hidden]`` on the CPU as a payload of the same dtype."""
    count, width = rows.shape
    return PromptEmbedsPayload(shape=(count, width), dtype=DTYPE_NAMES[rows.dtype], data=to_blob(rows))


def unpack_rows(payload: PromptEmbedsPayload) -> torch.Tensor:
    """The rows ``[n, hidden]`` of a payload whose fit was checked."""
    return from_blob(payload.data, payload.dtype, payload.shape)


def pack_positions(positions: torch.Tensor) -> AdditionalInformationPayload:
    """M-RoPE position ids int ``[3, n]`` as additional information."""
    entry = AdditionalInformationEntry(
        tensor_data=to_blob(positions.to(torch.int32)),
        tensor_shape=tuple(positions.shape),
        tensor_dtype="int32",
    )
    return AdditionalInformationPayload(entries={POSITIONS: entry})


def unpack_positions(payload: AdditionalInformationPayload, count: int) -> torch.Tensor:
    """The position ids int32 ``[3, count]`` that came with ``count`` rows.

    Raises:
        PayloadError: They are missing, of another type, or of another number.
    """
    entry = payload.entries.get(POSITIONS)
    if entry is None or entry.tensor_data is None:
        raise PayloadError(f"additional.{POSITIONS}", "is missing")
    if entry.tensor_dtype != "int32" or entry.tensor_shape != (3, count):
        raise PayloadError(
            f"additional.{POSITIONS}",
            f"is {entry.tensor_dtype} {entry.tensor_shape}, expected int32 (3, {count})",
        )
    return from_blob(entry.tensor_data, "int32", (3, count))
