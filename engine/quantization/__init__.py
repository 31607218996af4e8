"""Weight formats, one small file each, imported when a model uses one.

A format is a class of `LinearMethod` (`base.py`): how the weight of a linear module is kept, filled, packed
and multiplied. A `Scheme` gives each linear module its format. To add a format, write its file. To offer it
in `--quantize`, also give it a function `scheme` and add its name here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from personae.errors import LoadError

if TYPE_CHECKING:
    from personae.engine.quantization.base import LinearMethod, Scheme

QUANTIZATIONS = ("int8", "int4", "fp8")
"""The values of `--quantize`. Each is a file of this folder."""
WEIGHT_ONLY = ("int8", "int4")
"""Those that are formats of weights, and work with any dtype of activations."""

KEPT = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
"""The types of GGUF tensors that stay in their bits. Each is a format of `gguf.py`."""

FP8_BLOCK = 128
"""The outputs, and the inputs, of a block of FP8 that has a product: `fp8_blocks.py`."""

_METHODS = {"int8": "int8", "fp8": "fp8", "fp8_blocks": "fp8_blocks", **dict.fromkeys(KEPT, "gguf")}


def method_of(kind: str) -> type[LinearMethod]:
    """The format that has `kind` (`QuantizedWeight.kind`) as its weight."""
    module = import_module(f"personae.engine.quantization.{_METHODS[kind]}")
    found: type[LinearMethod] = module.METHODS[kind]
    return found


def scheme_of(name: str | None) -> Scheme:
    """The scheme of a `--quantize` value; None keeps the weights' dtype.

    Raises LoadError if there is no such format.
    """
    if name is not None and name not in QUANTIZATIONS:
        raise LoadError(f"--quantize {name}: choose one of {', '.join(QUANTIZATIONS)}.")
    found: Scheme = import_module(f"personae.engine.quantization.{name or 'unquantized'}").scheme
    return found
