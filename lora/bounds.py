"""The bounds that an adapter must fit; `fit.py` checks them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from personae.errors import AdapterError
from personae.lora.shapes import LoraShapes

_MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127
MAX_UPDATE = math.sqrt(_MAX_FLOAT32)


@dataclass(frozen=True, slots=True)
class AdapterBounds:
    """What an adapter must fit: the base's shapes, the pool's ranks, the range of its dtype, and the bytes
    for what it needs in addition to its ranks, which also bound what ranks on experts need. itemsize: of the
    pool's dtype. stored: the dtype (safetensors' name) of the file from which
    it is placed, if there is one (`lora/stored.py`). capacity_rows, max_adapters: of the pool, see
    LoraPool. rank_page: an adapter takes ranks in multiples of this number."""

    shapes: LoraShapes
    max_rank: int
    max_value: float
    max_extra: int = 2**63
    stored: str | None = None
    itemsize: int = 4
    capacity_rows: int = 2**31
    max_adapters: int = 2**31
    rank_page: int = 8

    @property
    def max_update(self) -> float:
        """The limit for an entry of scaling * B A. The dtype must hold it, and float32 its square, which
        norms use."""
        return min(self.max_value, MAX_UPDATE)

    def check_kept_loaded(self, kept: Sequence[Mapping[str, int]]) -> None:
        """Raises AdapterError if adapters with these ranks by module, which all stay on the device, would
        leave less than half of its slots, ranks or bytes to others."""
        rows: Counter[str] = Counter()
        for ranks in kept:
            for module, rank in ranks.items():
                rows[module] += -(-rank // self.rank_page) * self.rank_page
        widths = self.shapes.modules
        size = sum(count * sum(widths[module]) for module, count in rows.items())
        shared = [rows[module] for module in self.shapes.shared]  # experts have no ranks of their own
        for what, needed, most in (
            ("adapters", len(kept), self.max_adapters),
            ("ranks of a module", max(shared, default=0), self.capacity_rows),
            ("bytes", self.shapes.layers * size * self.itemsize, self.max_extra),
        ):
            if needed > most // 2:
                raise AdapterError(
                    f"adapters that stay loaded would have {needed} {what}; at most half of the device's "
                    f"memory for adapters may be theirs, {most // 2} {what}",
                    param="keep_loaded",
                )
