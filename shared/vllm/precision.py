"""How exactly a GPU computes in float32."""

from typing import Final

import torch

from shared.config import Precision

_MATMUL: Final[dict[Precision, str]] = {"exact": "highest", "fast": "high", "bfloat16": "high"}


def set_float32_precision(precision: Precision) -> None:
    """Choose between float32 and TF32 (10 bits of mantissa) for products and convolutions of this process.

    With ``bfloat16`` it is TF32 for what stays float32.

    PyTorch's own choice is float32 for products and TF32 for convolutions; vLLM sets the former again when
    it makes an engine, so this is called after it.
    """
    torch.set_float32_matmul_precision(_MATMUL[precision])
    # PyTorch's older switches, as vLLM's: mixed with the newer ones, reading either raises.
    torch.backends.cudnn.allow_tf32 = precision != "exact"
