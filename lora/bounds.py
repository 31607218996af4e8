"""Does an adapter fit? Uploads and loads are asked the same."""

from dataclasses import dataclass
from typing import Self

import torch

from personae.errors import AdapterError
from personae.lora.adapter import Adapter, LoraShapes
from personae.lora.arenas import pool_bytes

MAX_RANK = 512  # of one adapter's module: kernels size their scratch memory by it


@dataclass(frozen=True, slots=True)
class AdapterBounds:
    """What an adapter must fit: the base's shapes, ranks that the pool has, magnitudes that its dtype has,
    bytes for what it has beside its ranks. stored: the dtype, as safetensors names it, in which a file is
    kept of it for being placed, if one is (`lora/stored.py`)."""

    shapes: LoraShapes
    max_rank: int
    max_value: float
    max_extra: int = 2**63
    stored: str | None = None

    @classmethod
    def of_pool(
        cls, shapes: LoraShapes, capacity_rows: int, dtype: torch.dtype, stored: str | None = None
    ) -> Self:
        """Those of a LoraPool of this size."""
        memory = pool_bytes(shapes, capacity_rows, dtype)
        return cls(shapes, min(capacity_rows, MAX_RANK), torch.finfo(dtype).max, memory, stored)

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError if the adapter could never be placed."""
        for module, rank in adapter.ranks.items():
            if rank > self.max_rank:
                limit = (
                    f"{MAX_RANK} is the most that is served"
                    if self.max_rank == MAX_RANK
                    else f"the memory for adapters holds {self.max_rank} ranks; "
                    "start the server with a larger --adapter-memory"
                )
                raise AdapterError(f"rank {rank} of {module}: {limit}", param="r")
        if adapter.extra_bytes(self.shapes) > self.max_extra:
            raise AdapterError(
                f"{', '.join(adapter.traits())}: that takes {adapter.extra_bytes(self.shapes)} bytes beside "
                f"the ranks, of {self.max_extra} that there are; start the server with more --adapter-memory"
            )
        if not adapter.peak <= self.max_value:
            raise AdapterError(
                f"the largest value, {adapter.peak:.3g} with the scaling, is out of the range of the "
                "precision that the server computes in"
            )
