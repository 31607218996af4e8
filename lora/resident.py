"""Who lives in a pool."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Resident:
    """An adapter in the pool: its slot, its pages and ranks by module, the bytes of its extras, and how many
    hold it."""

    slot: int
    pages: Mapping[str, tuple[int, ...]]
    ranks: Mapping[str, int]
    extra: int = 0
    pins: int = 0
