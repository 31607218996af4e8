"""The memory of pages: one region, or one for each rank that has sequences of its own.

All pages of a sequence lie in one region, so its rank has all of its keys and values. Each region has a
prefix cache of its own. A sequence goes where most of its prompt is cached, but not to a region that has many
more sequences than others: its rank would be the last in each step.
"""

from collections.abc import Sequence

from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.pages import PagePool
from personae.engine.scheduling.prefix import PrefixCache, PrefixHit

SEQUENCE_TOKENS = 64  # so many cached tokens are worth a region that has one more sequence


class Region:
    """A part of the pages. `sequences`: how many running sequences have theirs in it."""

    __slots__ = ("cache", "pool", "sequences")

    def __init__(self, layout: MemoryLayout, number: int) -> None:
        size = layout.region_pages
        self.pool = PagePool(size, number * size)
        self.cache = PrefixCache(self.pool, layout.page_size, whole=layout.whole)
        self.sequences = 0

    @property
    def room(self) -> int:
        """The pages that can be allocated, if one stays for each running sequence to grow into."""
        return self.cache.available - self.sequences


def by_worth(regions: Sequence[Region], hits: Sequence[PrefixHit]) -> list[tuple[Region, PrefixHit]]:
    """The regions for a sequence that is cached in them as the hits say, the best one first."""

    def worth(choice: tuple[Region, PrefixHit]) -> tuple[int, int]:
        region, hit = choice
        return hit.length - SEQUENCE_TOKENS * region.sequences, region.room

    choices = list(zip(regions, hits, strict=True))
    return choices if len(choices) == 1 else sorted(choices, key=worth, reverse=True)
