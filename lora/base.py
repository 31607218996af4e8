"""What some adapters need from the base model's weights."""

import hashlib
from collections.abc import Iterator
from typing import Literal, Protocol

import torch
from torch import Tensor

_CHUNK = 8192  # rows of a matrix that are converted at a time

Site = tuple[int, str] | Literal["embedding", "output"]
"""A linear module of a layer, the embedding (as a linear module from token to vector), or the output
matrix."""


class BaseWeights(Protocol):
    """The base model's weights, W: [out, in] each; the embedding's is transposed, [hidden, vocabulary]."""

    def squares(self, site: Site) -> Tensor:
        """The sum of squares of each row of W: [out] float32."""

    def project(self, site: Site, a: Tensor) -> Tensor:
        """a W^T for a few rows a: [n, in] float32 -> [n, out] float32."""

    def bias(self, site: Site) -> Tensor | None:
        """The bias: [out] float32, or None."""


def fingerprint(weight: Tensor) -> str:
    """sha256 of a matrix rounded to bfloat16. Copies of the matrix in all usual precisions have the same
    one."""
    digest = hashlib.sha256()
    for chunk in chunks(weight):
        digest.update(chunk.to(torch.bfloat16).cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def chunks(weight: Tensor) -> Iterator[Tensor]:
    """A matrix in chunks of rows, so that converting it needs little memory."""
    for start in range(0, weight.shape[0], _CHUNK):
        yield weight[start : start + _CHUNK]
