"""The gated activations between the two halves of an MLP."""

from personae.kernels import reference
from personae.kernels.registry import Operator

silu_and_mul = Operator(reference.silu_and_mul)
gelu_and_mul = Operator(reference.gelu_and_mul)
swiglu_clamped = Operator(reference.swiglu_clamped)
