"""A matrix whose rows lie in several tensors of a checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor


def joined(parts: list[StoredTensor], order: Tensor | None = None) -> StoredTensor:
    """One matrix of the rows of several, in that order, or one after the other."""
    first, rows = parts[0], sum(tensor.shape[0] for tensor in parts)
    order = torch.arange(rows) if order is None else order
    return JoinedRows(
        first.name,
        first.file,
        (len(order), first.shape[1]),
        first.dtype,
        all(tensor.served for tensor in parts),
        sum(tensor.bytes for tensor in parts),
        tuple(parts),
        order,
    )


@dataclass(frozen=True, slots=True)
class JoinedRows(StoredTensor):
    """The rows of `parts`, one after the other, in that order."""

    parts: tuple[StoredTensor, ...]
    order: Tensor

    def read(self) -> Tensor:
        """See `StoredTensor`."""
        return torch.cat([part.read() for part in self.parts])[self.order]

    @property
    def kept(self) -> str | None:
        """See `StoredTensor`."""
        kinds = {part.kept for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else None

    def blocks(self, kind: str) -> Tensor:
        """See `StoredTensor`."""
        return torch.cat([part.blocks(kind) for part in self.parts])[self.order]

    def scaled(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """See `StoredTensor`."""
        found = [own for part in self.parts if (own := part.scaled(dtype)) is not None]
        if len(found) < len(self.parts):
            return None
        levels, scales = (torch.cat(each)[self.order] for each in zip(*found, strict=True))
        return levels, scales
