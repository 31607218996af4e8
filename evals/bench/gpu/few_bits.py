"""Products with weights in few bits: are they right, and how long do they take?"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.engine.quantization import method_of
from personae.engine.quantization.int4 import Int4Weight
from personae.engine.quantization.int8 import Int8Weight
from personae.evals.bench.gpu.checks import LIMITS, Check, poisoned_memory, relative_error
from personae.evals.bench.gpu.shapes import HIDDEN, noise
from personae.kernels.decoder import LinearWeights, PackedLinear, pack_linear
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.registry import override

PLAIN = "bfloat16, cuBLAS"
HALVES = {"Q8_0": (34, 0), "Q4_0": (18, 0), "Q4_1": (20, 0, 2), "Q4_K": (144, 0, 2), "Q6_K": (210, 208)}
"""The bytes of a block of GGUF, and where it has its float16 numbers, by kind."""
TRITON = "Q4_0, Triton"
"""Weights that tinygemm multiplies in bfloat16, and Triton's kernel too."""
HALVES[TRITON] = HALVES["Q4_0"]


def kinds() -> dict[str, type[QuantizedWeight]]:
    """By name; GGUF's only where its package is installed."""
    found: dict[str, type[QuantizedWeight]] = {"int8": Int8Weight, "int4": Int4Weight}
    if find_spec("gguf") is not None:
        found |= {kind: method_of(kind.partition(",")[0]).kept for kind in HALVES}  # type: ignore[attr-defined]  # quantized
    return found


def random_weight(kind: str, outputs: int, inputs: int, generator: torch.Generator) -> QuantizedWeight:
    """W [outputs, inputs] whose bits are random; every number is finite and of a usual size."""
    weight = kinds()[kind].empty(outputs, inputs, generator.device)
    for tensor in weight.tensors():
        if tensor.dtype is torch.float32:
            tensor.fill_(inputs**-0.5 / 100)
        else:
            tensor.view(torch.uint8).random_(0, 256, generator=generator)
    size, *places = HALVES.get(kind, (0,))
    for at in places:
        (rows,) = weight.tensors()
        blocks = rows.view(outputs, -1, size)
        blocks[:, :, at], blocks[:, :, at + 1] = 0, 16  # 2^-11
    return weight


def few_bits_checks(dtype: torch.dtype, generator: torch.Generator, width: int = HIDDEN) -> Iterator[Check]:
    """Rows of a decode step and of a prompt, with a bias."""
    for kind in kinds():
        weight = random_weight(kind, 200, width, generator)
        bias = noise((200,), dtype, generator)
        plain = weight.plain(dtype).double()  # before it is handed over
        product = _packed(kind, LinearWeights(weight, bias), dtype)
        for rows in (5, 100):
            x = noise((rows, width), dtype, generator)
            with poisoned_memory():
                found = product(x)
            truth = F.linear(x.double(), plain, bias.double())
            yield Check(
                f"weights in {kind}, {rows} rows, {dtype}", relative_error(found, truth), LIMITS[dtype]
            )


def bench_linear(
    kind: str, outputs: int, inputs: int, generator: torch.Generator
) -> tuple[Callable[[Tensor], Tensor], int]:
    """A product with a weight of that kind or `PLAIN`, and the bytes of the weight."""
    if kind == PLAIN:
        weight = noise((outputs, inputs), torch.bfloat16, generator)
        return lambda x: F.linear(x, weight), weight.nbytes
    quantized = random_weight(kind, outputs, inputs, generator)
    octets = quantized.nbytes
    return _packed(kind, LinearWeights(quantized, None), torch.bfloat16), octets


def _packed(kind: str, linear: LinearWeights, dtype: torch.dtype) -> PackedLinear:
    with override(pack_linear="triton") if kind == TRITON else nullcontext():
        product = pack_linear(linear, dtype)
    assert product is not None
    return product
