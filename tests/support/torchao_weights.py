"""A weight that torchao has quantized, as the tool itself dequantizes it."""

from typing import Any

import torch
from torch import Tensor


def plain_weight(weight: Any) -> Tensor:
    """The numbers of a quantized weight, in float32."""
    from torchao.quantization.quant_primitives import dequantize_affine

    if weight.qdata.dtype is torch.float8_e4m3fn:
        found: Tensor = weight.dequantize(torch.float32)
        return found
    scale, zero = weight.scale.float(), weight.zero_point
    found = dequantize_affine(
        weight.qdata, weight.block_size, scale, zero, torch.int8, output_dtype=torch.float32
    )
    return found  # noqa: RET504  the library has no types; `found` has one
