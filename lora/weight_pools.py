"""Where rank pages lie: halves of modules, in chunks of memory that are allocated and freed.

A half (A or B) of a module is one tensor, [groups, layers, pages, RANK_PAGE, width]. On the CPU a group is
eight pages. So what one layer reads of neighbouring pages is contiguous, and all memory of a page lies close
together. On a GPU whose memory can be lent a group is one page, so that a page needs few granules. On any
other GPU all pages are one group. The layers are views, each of which begins one layer's share of a group
after the one before. Kernels address a page by its number in such a view (`place`).

Memory is allocated and freed in chunks: on a GPU that lends memory a granule, elsewhere a page. `RankPages`
tracks which chunks are in use, `RankPools` which have memory. The granules of page 0 always have memory,
because all layers' views begin there, and a kernel's arguments must have memory at their address (see
`kernels.memory.Memory.reserve`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from personae.kernels.memory import Memory, unmapping_pages
from personae.kernels.sgmv import RANK_PAGE
from personae.lora.copies import Copies
from personae.lora.shapes import LoraShapes

GROUP = 8  # pages; in all layers about 2 MB, as much as the system allocates at once


class RankPool:
    """A half of a module. `chunk`: bytes per chunk. `kept`: the chunks that always have memory. `stale`: the
    chunks that no used page needs and that were not freed, and since which change."""

    def __init__(self, memory: Memory, layers: int, pages: int, width: int, dtype: torch.dtype) -> None:
        self._memory = memory
        self.group = 1 if memory.granule else min(GROUP, pages) if memory.lends else pages
        shape = (-(-pages // self.group), layers, self.group, RANK_PAGE, width)
        self.data = memory.reserve(shape, dtype)
        self._page_bytes = layers * RANK_PAGE * width * dtype.itemsize
        self.chunk = memory.granule or self._page_bytes
        self._mapped: set[int] = set()  # chunks with memory, if chunks are granules
        self.stale: dict[int, int] = {}
        self._changes = 0
        self.kept = self.chunks(0) if memory.granule else range(0)
        for chunk in self.kept:
            self.map(chunk)

    def chunks(self, page: int) -> range:
        """The chunks that contain a page."""
        first, last = page * self._page_bytes, (page + 1) * self._page_bytes
        return range(first // self.chunk, -(-last // self.chunk))

    def chunks_of(self, pages: Iterable[int]) -> Iterator[int]:
        """The chunks of each page, one page after the other."""
        return (chunk for page in pages for chunk in self.chunks(page))

    def layers(self) -> Tensor:
        """The rows of each layer [L, rows, width]. Layer 0's view has all rows but the last layers' shares,
        layer 1's begins at its share of the first group, and so on."""
        _, layers, pages, _, width = self.data.shape
        share = pages * RANK_PAGE
        rows = self.data.numel() // width - (layers - 1) * share
        return self.data.as_strided((layers, rows, width), (share * width, width, 1))

    def place(self, page: int) -> int:
        """The number of a page in each layer's view."""
        return page // self.group * self.group * self.data.shape[1] + page % self.group

    def used(self, chunks: Iterable[int]) -> None:
        """Pages in these chunks are in use."""
        for chunk in chunks:
            self.stale.pop(chunk, None)

    def left(self, chunks: Iterable[int]) -> None:
        """No page in these chunks is in use any more. Some may not have got their memory yet."""
        self._changes += 1
        backed = chunks if not self._memory.granule else self._mapped.intersection(chunks)
        self.stale.update(dict.fromkeys(backed, self._changes))

    def lacking(self, chunks: Iterable[int]) -> list[int]:
        """The chunks without memory, unless memory comes when it is written."""
        return [chunk for chunk in chunks if chunk not in self._mapped] if self._memory.granule else []

    def map(self, chunk: int) -> None:
        """Put memory behind a chunk."""
        self._memory.map(self._bytes(chunk))
        self._mapped.add(chunk)

    def unmapping(self, stale: Mapping[int, int]) -> Iterator[None]:
        """Free the chunks that have been `stale` ever since, piece by piece."""
        while chunks := [chunk for chunk, since in stale.items() if self.stale.get(chunk) == since]:
            if self._memory.granule:
                del self.stale[chunks[0]]
                self._mapped.remove(chunks[0])
                self._memory.unmap(self._bytes(chunks[0]))
            else:
                group = chunks[0] // self.group
                own = [page for page in chunks if page // self.group == group]
                for page in own:
                    del self.stale[page]
                self._unmap_pages(self.data[group], [page % self.group for page in own])
            yield

    def _unmap_pages(self, group: Tensor, pages: Collection[int]) -> None:
        """Free pages of a group [L, pages, RANK_PAGE, width]."""
        if len(pages) == group.shape[1]:
            self._memory.unmap(group)
            return
        for share in group:
            for _ in unmapping_pages(self._memory, share, pages):
                pass

    def _bytes(self, chunk: int) -> Tensor:
        return self.data.view(torch.uint8).flatten()[chunk * self.chunk : (chunk + 1) * self.chunk]


class RankPools(dict[str, tuple[RankPool, RankPool]]):
    """The halves A and B of all modules."""

    def __init__(
        self, memory: Memory, shapes: LoraShapes, pages: Mapping[str, int], dtype: torch.dtype
    ) -> None:
        self._memory = memory
        for module, (inputs, outputs) in shapes.modules.items():
            self[module] = (
                RankPool(memory, shapes.layers, pages[module], inputs, dtype),
                RankPool(memory, shapes.layers, pages[module], outputs, dtype),
            )

    def mapping(self, taken: Mapping[str, Collection[int]], copies: Copies, room: int) -> Iterator[None]:
        """Put memory behind allocated pages, piece by piece. If unused memory exceeds `room` bytes, it is
        freed first, because the new pages need it."""
        lacking = []
        for module, pages in taken.items():
            for half in self[module]:
                chunks = set(half.chunks_of(pages))
                half.used(chunks)
                lacking += [(half, chunk) for chunk in half.lacking(chunks)]
        giving = self.unmapping(copies)
        while sum(half.chunk * len(half.stale) for pair in self.values() for half in pair) > room:
            yield next(giving)
        for half, chunk in lacking:
            if not self._memory.free:
                yield from self.unmapping(copies)
            if half.lacking([chunk]):  # another load may have backed it in the meantime
                half.map(chunk)
                yield

    def unmapping(self, copies: Copies) -> Iterator[None]:
        """Free what no adapter uses, piece by piece: after the device has done its earlier work, which may
        still read it, and after the copies for evicted adapters are done."""
        halves = [half for pair in self.values() for half in pair]
        while stale := [(half, half.stale.copy()) for half in halves if half.stale]:
            copies.begin()
            mark = copies.mark()
            while mark is not None and not mark.reached:
                yield
            for half, chunks in stale:
                yield from half.unmapping(chunks)


class RankPages:
    """Which pages and chunks are in use. `free`: by module, the free pages, the lowest first, so that used
    pages share chunks. For each chunk it counts the used pages, plus one if the chunk is kept. `used`: the
    bytes of the chunks in use."""

    def __init__(
        self, weight_pools: Mapping[str, tuple[RankPool, RankPool]], pages: Mapping[str, int]
    ) -> None:
        self._weight_pools = weight_pools
        self.free = {module: list(range(pages.get(module, 0))) for module in weight_pools}
        self._users = {module: (Counter(a.kept), Counter(b.kept)) for module, (a, b) in weight_pools.items()}
        self.used = sum(half.chunk * len(half.kept) for pair in weight_pools.values() for half in pair)

    def copy(self) -> "RankPages":
        """A copy, to try out changes."""
        other = RankPages(self._weight_pools, {})
        other.free = {module: free.copy() for module, free in self.free.items()}
        other._users = {module: (a.copy(), b.copy()) for module, (a, b) in self._users.items()}
        other.used = self.used
        return other

    def _halves(self, module: str) -> Iterator[tuple[RankPool, Counter[int]]]:
        """A and B of a module, and how many use their chunks."""
        return zip(self._weight_pools[module], self._users[module], strict=True)

    def cost(self, counts: Mapping[str, int]) -> int:
        """The bytes by which `used` would grow if this many pages of each module were taken."""
        total = 0
        for module, count in counts.items():
            pages = self.free[module][:count]
            for half, users in self._halves(module):
                chunks = set(half.chunks_of(pages))
                total += half.chunk * sum(not users[chunk] for chunk in chunks)
        return total

    def take(self, module: str, count: int) -> tuple[int, ...]:
        """Take this many free pages."""
        pages = tuple(self.free[module][:count])
        del self.free[module][:count]
        for half, users in self._halves(module):
            for chunk in half.chunks_of(pages):
                self.used += 0 if users[chunk] else half.chunk
                users[chunk] += 1
        return pages

    def put(self, module: str, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """Free pages. Returns the chunks of A, and of B, that are not used any more."""
        self.free[module] += pages
        self.free[module].sort()
        idle: tuple[list[int], list[int]] = ([], [])
        for (half, users), found in zip(self._halves(module), idle, strict=True):
            for chunk in half.chunks_of(pages):
                users[chunk] -= 1
                if not users[chunk]:
                    del users[chunk]
                    self.used -= half.chunk
                    found.append(chunk)
        return idle

    def check_integrity(self, taken: Iterable[Mapping[str, Sequence[int]]]) -> None:
        """Compare with the truth: the pages that each adapter has. Raises AssertionError."""
        free_pages = RankPages(self._weight_pools, {})
        for adapter in taken:
            for module, pages in adapter.items():
                free_pages.free[module] = sorted(pages)
                free_pages.take(module, len(pages))
        assert self._users == free_pages._users, "users of chunks"
        assert self.used == free_pages.used, f"{self.used} bytes are used, or {free_pages.used}"


def pool_bytes(shapes: LoraShapes, capacity_rows: int, dtype: torch.dtype, granule: int = 0) -> int:
    """The bytes of a pool's weight pools with this many rank rows per module, each in whole granules. Experts
    have no rows of their own: their pages take memory that others leave."""
    widths = [width for pair in shapes.shared.values() for width in pair]
    sizes = [shapes.layers * capacity_rows * width * dtype.itemsize for width in widths]
    return sum(-(-size // granule) * granule if granule else size for size in sizes)


def pages_by_module(shapes: LoraShapes, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """The pages that have an address: of experts as many as all memory of `rows` ranks could hold."""
    pages, memory = rows // RANK_PAGE, pool_bytes(shapes, rows, dtype)
    return {
        module: pages
        if site.experts == 1
        else max(min(pages * site.experts, memory // page_bytes(shapes, module, dtype.itemsize)), 1)
        for module, site in shapes.sites.items()
    }


def page_bytes(shapes: LoraShapes, module: str, itemsize: int) -> int:
    """The bytes of a page of one module, in all layers."""
    return shapes.layers * RANK_PAGE * sum(shapes.modules[module]) * itemsize


def adapter_bytes(shapes: LoraShapes, ranks: Mapping[str, int], itemsize: int) -> int:
    """The bytes of the pages of an adapter with these ranks by module."""
    return sum(-(-rank // RANK_PAGE) * page_bytes(shapes, module, itemsize) for module, rank in ranks.items())
