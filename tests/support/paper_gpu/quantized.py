"""Products with weights in few bits in torch, computed only from the arguments of their launch; see
`kernels/triton/device/quantized.py` and `blocks.py`."""

from types import SimpleNamespace

import torch.nn.functional as F

from personae.engine.quantization.int4 import Int4Weight
from personae.engine.quantization.int8 import Int8Weight
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.triton.blocks import Layout, Repacked


def int8_linear(a: SimpleNamespace) -> None:
    """y = x W^T + bias."""
    _multiply(a, Int8Weight(a.inputs, a.scales_ptr, a.values_ptr))


def int4_linear(a: SimpleNamespace) -> None:
    """As `int8_linear`."""
    assert a.steps_ptr.shape[1] == a.groups
    _multiply(a, Int4Weight(a.inputs, a.scales_ptr, a.levels_ptr, a.steps_ptr))


def block_linear(a: SimpleNamespace) -> None:
    """As `int8_linear`."""
    layout = Layout(a.BITS, a.ZERO, a.GROUP, a.BLOCK, 0, a.LEAST)
    assert layout.codes == a.CODES
    weight = Repacked(
        layout,
        a.levels_ptr,
        a.high_ptr if a.BITS == 6 else None,
        a.scales_ptr,
        a.least_ptr if a.LEAST else None,
        a.codes_ptr if a.CODES else None,
        a.least_codes_ptr if a.CODES and a.LEAST else None,
    )
    _multiply(a, weight)


def _multiply(a: SimpleNamespace, weight: QuantizedWeight | Repacked) -> None:
    assert a.y_ptr.shape == (a.rows, a.outputs)
    assert weight.shape == (a.outputs, a.inputs)
    bias = a.bias_ptr if a.BIAS else None
    a.y_ptr.copy_(F.linear(a.x_ptr, weight.plain(a.x_ptr.dtype), bias))


KERNELS = {
    "int8_linear_kernel": int8_linear,
    "int4_linear_kernel": int4_linear,
    "block_linear_kernel": block_linear,
}
