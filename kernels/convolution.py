"""Convolutions over the few tokens before each token, which are read from the cache."""

from personae.kernels import reference
from personae.kernels.registry import Operator

short_convolution = Operator(reference.short_convolution)
