"""What PyTorch is told about float32 on GPUs; nothing is computed there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared.config import Precision
from shared.vllm.precision import set_float32_precision

CUDNN: Any = torch.backends.cudnn


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    matmul, cudnn = torch.get_float32_matmul_precision(), CUDNN.allow_tf32
    yield
    torch.set_float32_matmul_precision(matmul)
    CUDNN.allow_tf32 = cudnn


@pytest.mark.parametrize("precision", ["exact", "fast", "bfloat16"])
def test_products_and_convolutions_have_one_precision(precision: Precision) -> None:
    set_float32_precision("fast" if precision == "exact" else "exact")
    set_float32_precision(precision)
    for operators in (torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn):
        assert (operators.fp32_precision == "tf32") is (precision != "exact")
    # What libraries read and set: it raises if the switches contradict each other.
    assert torch.get_float32_matmul_precision() == ("highest" if precision == "exact" else "high")
    assert CUDNN.allow_tf32 is (precision != "exact")
    with CUDNN.flags(enabled=True, benchmark=False):
        pass
