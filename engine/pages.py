"""Fixed-size pages of KV memory, counted.

The pool knows page ids and how many holders each has; what lies in a page, and whether it may be evicted,
others know (engine/prefix.py). The verbs come in pairs: `can_allocate` and `allocate`, `share` and
`release`.
"""

from collections import Counter
from collections.abc import Iterable


class PagePool:
    """Pages 0 to `size` - 1, each free or held by one or more holders."""

    __slots__ = ("_free", "_references", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._references = [0] * size
        self._free = list(range(size - 1, -1, -1))  # a stack: the page freed last is the warmest

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        """Whether `count` pages are free."""
        return count <= len(self._free)

    def allocate(self, count: int, *, coldest: bool = False) -> list[int]:
        """Take `count` free pages, each with one reference; `coldest`: those that have been free for longest,
        or were never used. Ask `can_allocate` first."""
        assert self.can_allocate(count), f"{count} pages wanted, {self.free} free"
        if count == 0:
            return []
        taken = slice(count) if coldest else slice(-count, None)
        pages = self._free[taken]
        del self._free[taken]
        pages.reverse()
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder of a page that is held."""
        assert self._references[page] > 0, f"page {page} is free and cannot be shared"
        self._references[page] += 1

    def release(self, page: int, *, coldest: bool = False) -> None:
        """One holder less; the last one frees the page, which is then the warmest, or the coldest."""
        assert self._references[page] > 0, f"page {page} is released more often than it was taken"
        self._references[page] -= 1
        if not self._references[page]:
            self._free.insert(0 if coldest else len(self._free), page)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Compare with the truth: `held` names a page once for each reference that anyone holds.

        Raises AssertionError, naming the page.
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
