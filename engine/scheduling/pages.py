"""Fixed-size pages of KV memory, with reference counts.

The pool knows page ids and how many holders each has. engine/scheduling/prefix.py knows what a page contains
and whether it may be evicted. The verbs come in pairs: `can_allocate` and `allocate`, `share` and `release`.

The lowest free pages are allocated first. So whole runs at the end stay free, and if memory comes when it is
written, pages that were never used have none. The last pages are lent first.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush


class PagePool:
    """The `size` pages from `first` on, each free or held by one or more holders."""

    __slots__ = ("_free", "_references", "size")

    def __init__(self, size: int, first: int = 0) -> None:
        self.size = size
        self._references = [0] * (first + size)
        self._free = list(range(first, first + size))  # a heap

    @property
    def free(self) -> int:
        """How many pages have no holder."""
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        """Whether `count` pages are free."""
        return count <= len(self._free)

    def free_by_run(self, run: int) -> Counter[int]:
        """How many pages of each run of `run` pages are free."""
        return Counter(page // run for page in self._free)

    def allocate(self, count: int) -> list[int]:
        """Take the lowest `count` free pages, each with one reference. Call `can_allocate` first."""
        assert self.can_allocate(count), f"{count} pages are needed, {self.free} are free"
        pages = [heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def take(self, pages: Collection[int]) -> None:
        """Take these free pages, each with one reference."""
        wanted = set(pages)
        left = [page for page in self._free if page not in wanted]
        assert len(left) == len(self._free) - len(wanted), "a requested page is not free"
        heapify(left)
        self._free = left
        for page in wanted:
            self._references[page] = 1

    def share(self, page: int) -> None:
        """Add a holder to a held page."""
        assert self._references[page] > 0, f"page {page} is free and cannot be shared"
        self._references[page] += 1

    def release(self, page: int) -> bool:
        """Remove a holder. The last one frees the page. Returns whether it was the last."""
        assert self._references[page] > 0, f"page {page} is released more often than taken"
        self._references[page] -= 1
        if self._references[page]:
            return False
        heappush(self._free, page)
        return True

    def check_integrity(self, held: Iterable[int]) -> None:
        """Compare with the truth: `held` has a page once for each reference that anyone holds.

        Raises AssertionError, which names the page.
        """
        counts = Counter(held)
        for page, references in enumerate(self._references):
            assert references == counts[page], f"page {page}: {references} references, {counts[page]} holders"
        free = Counter(self._free)
        for page, times in free.items():
            assert times == 1, f"page {page} is on the free list {times} times"
            assert not self._references[page], (
                f"page {page} is free and has {self._references[page]} references"
            )
        lost = self.size - len(free) - len(counts)
        assert not lost, f"{lost} pages are neither free nor held"
