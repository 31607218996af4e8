"""Who lives in a pool."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Resident:
    """An adapter in the pool: its slot, its pages and ranks by module, their bytes and those of its extras,
    and how many hold it."""

    slot: int
    pages: Mapping[str, tuple[int, ...]]
    ranks: Mapping[str, int]
    size: int = 0
    extra: int = 0
    pins: int = 0
