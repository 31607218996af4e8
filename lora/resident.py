"""The adapters in a pool."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Resident:
    """An adapter in the pool: its slot, its pages and ranks by module, the bytes of its non-LoRA deltas, and
    its pins."""

    slot: int
    pages: Mapping[str, tuple[int, ...]]
    ranks: Mapping[str, int]
    extra: int = 0
    pins: int = 0
