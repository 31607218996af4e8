"""What every adapter of a server must fit, as plain data."""

import math
from dataclasses import dataclass

from personae.lora.shapes import LoraShapes

_MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127
MAX_UPDATE = math.sqrt(_MAX_FLOAT32)


@dataclass(frozen=True, slots=True)
class AdapterBounds:
    """The base's shapes, the pool's ranks, its dtype's magnitudes, the bytes for what an adapter has in
    addition to its ranks (`lora/fit.py` checks them). stored: the dtype (safetensors' name) of the file from
    which it is placed, if there is one (`lora/stored.py`)."""

    shapes: LoraShapes
    max_rank: int
    max_value: float
    max_extra: int = 2**63
    stored: str | None = None

    @property
    def max_update(self) -> float:
        """The most that an entry of scaling * B A may reach: the dtype has it, and float32 its square, which
        norms are made of."""
        return min(self.max_value, MAX_UPDATE)
