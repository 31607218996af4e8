"""The bounds that an adapter must fit; `fit.py` checks them."""

import math
from dataclasses import dataclass

from personae.lora.shapes import LoraShapes

_MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127
MAX_UPDATE = math.sqrt(_MAX_FLOAT32)


@dataclass(frozen=True, slots=True)
class AdapterBounds:
    """What an adapter must fit: the base's shapes, the pool's ranks, the range of its dtype, and the bytes
    for what it needs in addition to its ranks, which also bound what ranks on experts need. itemsize: of the
    pool's dtype. stored: the dtype (safetensors' name) of the file from which
    it is placed, if there is one (`lora/stored.py`). capacity_rows, max_adapters: of the pool, see
    LoraPool."""

    shapes: LoraShapes
    max_rank: int
    max_value: float
    max_extra: int = 2**63
    stored: str | None = None
    itemsize: int = 4
    capacity_rows: int = 2**31
    max_adapters: int = 2**31

    @property
    def max_update(self) -> float:
        """The limit for an entry of scaling * B A. The dtype must hold it, and float32 its square, which
        norms use."""
        return min(self.max_value, MAX_UPDATE)
