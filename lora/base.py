"""What some adapters need from the base model's weights."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

import torch
from torch import Tensor

from personae.lora.shapes import Fingerprint

CHUNK = 8192  # rows of a matrix that are converted at a time

Site = tuple[int, str] | Literal["embedding", "output"]
"""A linear module of a layer, the embedding (as a linear module from token to vector), or the output
matrix."""


class BaseWeights(Protocol):
    """The base model's weights, W: [out, in] each; the embedding's is transposed, [hidden, vocabulary]. Of
    the modules of layers, a rank has its part; all ranks call the methods alike."""

    def squares(self, site: Site) -> Tensor:
        """The sum of squares of each row of W: [out] float32."""

    def project(self, site: Site, a: Tensor) -> Tensor:
        """a W^T for a few rows a: [n, in] float32 -> [n, out] float32."""

    def total(self, site: Site, squares: Tensor) -> Tensor:
        """The sum of `squares` over the ranks that share the site's inputs: sums of squares of parts of its
        rows."""

    def everywhere(self, good: bool) -> bool:
        """Whether it is good on all ranks that share a site, so that all of them go on or none."""

    def name(self, site: Site) -> str:
        """The site's name in messages."""

    def bias(self, site: Site) -> Tensor | None:
        """The bias: [out] float32, or None."""


def fingerprint(weight: Tensor | Iterable[Tensor]) -> Fingerprint:
    """The fingerprint of a matrix, whole or in chunks of rows. It matches those of copies in all usual
    precisions."""
    dtypes = (torch.bfloat16, torch.float16)
    digests = [hashlib.sha256() for _ in dtypes]
    for chunk in chunks(weight) if isinstance(weight, Tensor) else weight:
        for dtype, digest in zip(dtypes, digests, strict=True):
            digest.update(chunk.to(dtype).cpu().contiguous().view(torch.uint8).numpy().data)
    return Fingerprint(*(digest.hexdigest() for digest in digests))


def chunks(weight: Tensor) -> Iterator[Tensor]:
    """A matrix in chunks of rows, so that converting it needs little memory."""
    for start in range(0, weight.shape[0], CHUNK):
        yield weight[start : start + CHUNK]
