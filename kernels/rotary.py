"""Rotary position embedding."""

from personae.kernels import reference
from personae.kernels.registry import Operator

rotary = Operator(reference.rotary)
