"""Tensors to payloads and back: the same bytes, the same dtype."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnirelay.errors import PayloadError
from shared.messages import ConditioningRows, TalkerInput
from shared.messages.payloads import (
    ITEM_SIZE,
    ROW_DTYPES,
    AdditionalInformationEntry,
    AdditionalInformationPayload,
    Blob,
)
from shared.transport.wire import Decoder, encode
from shared.vllm.tensors import (
    DTYPE_NAMES,
    POSITIONS,
    TORCH_DTYPES,
    from_blob,
    pack_positions,
    pack_rows,
    to_blob,
    unpack_positions,
    unpack_rows,
)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[str], min_rank: int = 0, max_rank: int = 4) -> torch.Tensor:
    """A tensor of any bytes, NaNs of every kind among them."""
    shape = draw(st.lists(st.integers(0, 5), min_size=min_rank, max_size=max_rank))
    dtype = draw(st.sampled_from(dtypes))
    size = math.prod(shape) * ITEM_SIZE[dtype]
    data = draw(st.binary(min_size=size, max_size=size))
    if not size:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=TORCH_DTYPES[dtype]).reshape(shape)


@given(tensor=tensors(sorted(ITEM_SIZE)))
@settings(deadline=None, max_examples=200)
def test_any_tensor_comes_back_byte_for_byte(tensor):
    name = DTYPE_NAMES[tensor.dtype]
    again = from_blob(to_blob(tensor), name, tuple(tensor.shape))
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert raw_bytes(again) == raw_bytes(tensor)


@given(rows=tensors(list(ROW_DTYPES), min_rank=2, max_rank=2), last=st.booleans())
@settings(deadline=None, max_examples=150)
def test_rows_cross_the_wire_byte_for_byte_in_their_own_dtype(rows, last):
    positions = torch.arange(3 * rows.shape[0]).reshape(3, -1)
    message = ConditioningRows(
        request_id="a", seq=0, start=0, rows=pack_rows(rows), additional=pack_positions(positions), last=last
    )
    assert message.rows.data.nbytes == rows.numel() * rows.element_size()
    frames = [bytes(frame) for frame in encode(message)]
    decoded = Decoder[ConditioningRows](TalkerInput).decode(frames)
    again = unpack_rows(decoded.rows)
    assert (again.dtype, again.shape) == (rows.dtype, rows.shape)
    assert raw_bytes(again) == raw_bytes(rows)
    assert torch.equal(unpack_positions(decoded.additional, rows.shape[0]), positions.to(torch.int32))


def test_packing_shares_the_memory_of_the_tensor():
    rows = torch.zeros(1000, 1000)
    tracemalloc.start()
    payload = pack_rows(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.shares_memory(np.frombuffer(payload.data.view, np.uint8), rows.numpy())
    assert peak < 100_000


def test_a_tensor_with_gaps_is_packed_in_its_own_order():
    rows = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
    assert not rows.is_contiguous()
    assert torch.equal(unpack_rows(pack_rows(rows)), rows)
    every_second = torch.arange(10, dtype=torch.int32)[::2]
    assert np.frombuffer(to_blob(every_second).view, np.int32).tolist() == [0, 2, 4, 6, 8]


def test_a_tensor_that_needs_gradients_can_be_packed():
    assert to_blob(torch.ones(2, requires_grad=True)).nbytes == 8


def test_an_unpacked_tensor_has_memory_of_its_own():
    """The frame it came in may be large and is let go."""
    data = bytearray(16)
    tensor = from_blob(Blob(data), "float32", (4,))
    tensor += 1
    assert bytes(data) == bytes(16)
    data.append(0)  # Raises BufferError while the tensor refers to it.
    assert tensor.tolist() == [1, 1, 1, 1]


def entry(tensor: torch.Tensor) -> AdditionalInformationEntry:
    return AdditionalInformationEntry(
        tensor_data=to_blob(tensor), tensor_shape=tuple(tensor.shape), tensor_dtype=DTYPE_NAMES[tensor.dtype]
    )


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({}, "is missing"),
        ({"other": entry(torch.zeros(3, 2, dtype=torch.int32))}, "is missing"),
        ({POSITIONS: AdditionalInformationEntry(list_data=[0, 1, 2, 0, 1, 2])}, "is missing"),
        ({POSITIONS: entry(torch.zeros(3, 2, dtype=torch.int64))}, r"is int64 .*, expected int32 \(3, 2\)"),
        ({POSITIONS: entry(torch.zeros(3, 2))}, "is float32"),
        ({POSITIONS: entry(torch.zeros(3, 1, dtype=torch.int32))}, r"is int32 \(3, 1\)"),
        ({POSITIONS: entry(torch.zeros(2, 3, dtype=torch.int32))}, r"is int32 \(2, 3\)"),
        ({POSITIONS: entry(torch.zeros(6, dtype=torch.int32))}, r"is int32 \(6,\)"),
    ],
)
def test_positions_that_are_missing_or_wrong_are_refused(entries, problem):
    with pytest.raises(PayloadError, match=problem) as caught:
        unpack_positions(AdditionalInformationPayload(entries=entries), 2)
    assert caught.value.field == "additional.mrope_positions"


@pytest.mark.parametrize(
    ("width", "dtype", "field"), [(5, "float32", "rows.shape"), (4, "bfloat16", "rows.dtype")]
)
def test_rows_that_do_not_fit_the_stage_are_refused(width, dtype, field):
    payload = pack_rows(torch.zeros(2, 4))
    payload.check_fits(4, "float32")
    with pytest.raises(PayloadError) as caught:
        payload.check_fits(width, dtype)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "wrong",
    [
        AdditionalInformationEntry(),
        AdditionalInformationEntry(tensor_data=Blob(b"1234")),
        AdditionalInformationEntry(tensor_data=Blob(b"1234"), tensor_shape=(1,)),
        AdditionalInformationEntry(tensor_data=Blob(b"1234"), tensor_dtype="int32"),
        AdditionalInformationEntry(list_data=[], tensor_data=Blob(b"")),
        AdditionalInformationEntry(list_data=[1], tensor_dtype="int32"),
        AdditionalInformationEntry(tensor_data=Blob(b"123"), tensor_shape=(1,), tensor_dtype="int32"),
        AdditionalInformationEntry(tensor_data=Blob(b"1234"), tensor_shape=(1,), tensor_dtype="complex64"),
    ],
)
def test_an_entry_that_is_not_exactly_one_sound_tensor_or_list_is_refused(wrong):
    with pytest.raises(PayloadError) as caught:
        AdditionalInformationPayload(entries={"extra": wrong}).check()
    assert caught.value.field.startswith("additional.extra")


def test_a_blob_is_compared_by_its_bytes_and_does_not_show_them():
    assert Blob(b"abcd") == Blob(memoryview(bytearray(b"abcd")))
    assert Blob(b"abcd") != Blob(b"abce")
    assert Blob(b"abcd") != b"abcd"
    assert len({Blob(b"abcd"), Blob(bytearray(b"abcd"))}) == 1
    assert repr(Blob(b"secret")) == "Blob(6 bytes)"
    assert Blob(np.zeros((2, 3), np.float32).data).nbytes == 24
