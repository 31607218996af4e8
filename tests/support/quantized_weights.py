"""Weights of every kind that a GPU multiplies in its bits, random."""

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf_files import blocks

from personae.engine.quantization import gguf
from personae.engine.quantization.int4 import Int4Weight
from personae.engine.quantization.int8 import Int8Weight
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.triton.blocks import LAYOUTS

KINDS = ("int8", "int4", *LAYOUTS)


def whole_blocks(kind: str, inputs: int) -> int:
    """The least number of inputs, at least so many, that the kind can have."""
    block = LAYOUTS[kind].block if kind in LAYOUTS else 1
    return -(-inputs // block) * block


def weight_of(kind: str, outputs: int, inputs: int, seed: int) -> QuantizedWeight:
    """W [outputs, inputs] with sums of about 1."""
    plain = torch.from_numpy(np.random.default_rng(seed).standard_normal((outputs, inputs), np.float32))
    plain *= inputs**-0.5
    if kind not in LAYOUTS:
        weight = {"int8": Int8Weight, "int4": Int4Weight}[kind].empty(outputs, inputs, plain.device)
        weight.copy_(plain)
        return weight
    raw = blocks(plain.numpy(), GGMLQuantizationType[kind], seed).reshape(outputs, -1)
    return gguf.METHODS[kind].kept(inputs, torch.from_numpy(raw))
