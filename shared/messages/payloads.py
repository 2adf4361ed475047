"""Tensors in a message, and the checks that keep them from lying about themselves.

``PromptEmbedsPayload``, ``AdditionalInformationEntry`` and ``AdditionalInformationPayload`` keep the
names that vLLM's omni work gave them.
"""

import math
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from omnirelay.errors import PayloadError
from omnirelay.values import Name

ITEM_SIZE: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1}
"""Bytes per element of each dtype that may cross a socket."""

ROW_DTYPES: Final = ("float32", "float16", "bfloat16")
"""Dtypes that conditioning rows may have."""


class Blob:
    """Bytes that travel out of band, as a frame of their own, without being copied.

    ``view`` is a contiguous memory view of bytes (format ``B``); after decoding it refers to the
    received frame, which lives as long as the view.
    """

    __slots__ = ("view",)

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        self.view = view if view.format == "B" and view.ndim == 1 else view.cast("B")

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.view.nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blob) and self.view == other.view

    def __hash__(self) -> int:
        return hash(bytes(self.view))

    def __repr__(self) -> str:
        return f"Blob({self.nbytes} bytes)"


def check_tensor(field: str, shape: tuple[int, ...], dtype: str, data: Blob) -> None:
    """Refuse a tensor whose shape, dtype and number of bytes do not agree.

    Args:
        field: Name of the message's field, for the error.
        shape: As the message claims.
        dtype: As the message claims.
        data: The bytes that came with it.

    Raises:
        PayloadError: It lies; the message names the part that does.
    """
    if dtype not in ITEM_SIZE:
        raise PayloadError(f"{field}.dtype", f"{dtype!r} is not one of {', '.join(ITEM_SIZE)}")
    if any(size < 0 for size in shape):
        raise PayloadError(f"{field}.shape", f"has a negative size: {list(shape)}")
    expected = math.prod(shape) * ITEM_SIZE[dtype]
    if expected != data.nbytes:
        raise PayloadError(
            f"{field}.data", f"holds {data.nbytes} bytes, but shape {list(shape)} of {dtype} needs {expected}"
        )


class PromptEmbedsPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditioning rows: one row per position, last hidden state + text embedding.

    Attributes:
        shape: ``[n, hidden]``: number of rows, width of a row.
        dtype: One of :data:`ROW_DTYPES`; the model's own, nothing is upcast.
        data: ``n * hidden`` elements, row-major, native little-endian bytes.
    """

    shape: tuple[int, int]
    dtype: str
    data: Blob

    def check(self) -> None:
        """Refuse rows that lie about themselves; a :class:`PayloadError` names the field that is wrong."""
        if self.dtype not in ROW_DTYPES:
            raise PayloadError("rows.dtype", f"{self.dtype!r} is not one of {', '.join(ROW_DTYPES)}")
        check_tensor("rows", self.shape, self.dtype, self.data)

    def check_fits(self, width: int, dtype: str) -> None:
        """Refuse rows that are not what the receiving stage takes; raises as :meth:`check`."""
        if self.shape[1] != width:
            raise PayloadError("rows.shape", f"rows are {self.shape[1]} wide, this stage takes {width}")
        if self.dtype != dtype:
            raise PayloadError("rows.dtype", f"rows are {self.dtype}, this stage takes {dtype}")


class AdditionalInformationEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One named extra: a tensor or a list, exactly one of the two.

    Attributes:
        tensor_data: The tensor's bytes, row-major.
        tensor_shape: Its shape.
        tensor_dtype: Its dtype, a key of :data:`ITEM_SIZE`.
        list_data: A flat list of plain values, at most 65,536 of them.
    """

    tensor_data: Blob | None = None
    tensor_shape: Annotated[tuple[int, ...], Meta(max_length=8)] | None = None
    tensor_dtype: str | None = None
    list_data: Annotated[list[int | float | str | bool | None], Meta(max_length=65_536)] | None = None

    def check(self, field: str) -> None:
        """Refuse an entry that is neither, both, or a tensor that lies; raises :class:`PayloadError`."""
        parts = (self.tensor_data, self.tensor_shape, self.tensor_dtype)
        if self.list_data is not None:
            if any(part is not None for part in parts):
                raise PayloadError(field, "holds a list and a tensor, exactly one is allowed")
            return
        if self.tensor_data is None or self.tensor_shape is None or self.tensor_dtype is None:
            raise PayloadError(field, "needs either list_data or all of tensor_data, _shape and _dtype")
        check_tensor(field, self.tensor_shape, self.tensor_dtype, self.tensor_data)


class AdditionalInformationPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Named extras that travel with rows.

    Attributes:
        entries: At most 16, by name.  Known today: ``mrope_positions``, int32 ``[3, n]``, the
            temporal, height and width position id of each row (M-RoPE, Qwen2-VL).
    """

    entries: Annotated[dict[Name, AdditionalInformationEntry], Meta(max_length=16)]

    def check(self) -> None:
        """Check every entry; a :class:`PayloadError` names the one that is wrong."""
        for name, entry in self.entries.items():
            entry.check(f"additional.{name}")


DEFAULT_WINDOW_BYTES: Final = 64 * 2**20
DEFAULT_MAX_PAYLOAD_BYTES: Final = 100 * 10**6
