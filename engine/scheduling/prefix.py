"""Automatic prefix cache: computed KV pages, found again by what they were computed from.

The cache is a trie of full pages. A root stands for a tagged tuple of tenant salt and adapter digest. An edge
stands for the `page_size` tokens of one page, which are compared token by token, never by hash alone. So by
construction no tenant can hit another's pages, and no adapter another's. An adapter that is only active from
some token on (activated LoRA) begins at the base's root, and the token where it becomes active carries its
digest.

A running sequence holds a `CacheHandle`: the path of nodes for its own full pages. If a node is held, so are
its ancestors. A handle is released from its deep end. So in the order of last use an unheld child always
comes before its unheld parent, and the least recently used unheld node is always a leaf: eviction is one pop.

Full pages are shared by reference. A hit that ends inside a page is served by copying that page
(copy-on-write): the caller gets the node to copy from, pinned until `unpin`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple, Protocol

from personae.engine.plan import PageKey
from personae.engine.scheduling.page_names import RootKey, Token, chunk_bytes, page_name, root_name
from personae.engine.scheduling.pages import PagePool

_SCAN = 16  # children examined for a hit inside a page, youngest first


class TrieNode:
    """A node of the trie. `handles` counts the running sequences whose path includes it. `name` is None until
    `name_of` has computed it."""

    __slots__ = ("children", "handles", "name")

    def __init__(self) -> None:
        self.children: dict[tuple[Token, ...], PageNode] = {}
        self.handles = 0
        self.name: bytes | None = None


class TrieRoot(TrieNode):
    """The root of one (salt, adapter)."""

    __slots__ = ("key",)

    def __init__(self, key: RootKey) -> None:
        super().__init__()
        self.key = key


class PageNode(TrieNode):
    """One full page of KV: its tokens `chunk`, its page id `page`, and the node before it, `parent`.
    `stored`: a tier got it."""

    __slots__ = ("chunk", "page", "parent", "stored")

    def __init__(self, chunk: tuple[Token, ...], page: int, parent: TrieNode) -> None:
        super().__init__()
        self.chunk = chunk
        self.page = page
        self.parent = parent
        self.stored = False


def key_of(node: PageNode) -> PageKey:
    """The page as tiers know it."""
    return PageKey(name_of(node), name_of(node.parent), chunk_bytes(node.chunk))


def name_of(node: TrieNode) -> bytes:
    """The name of a page, or of a root: see `page_names.py`."""
    unnamed: list[PageNode] = []
    here: TrieNode = node
    while here.name is None and isinstance(here, PageNode):
        unnamed.append(here)
        here = here.parent
    if here.name is None:
        assert isinstance(here, TrieRoot)
        here.name = root_name(here.key)
    name = here.name
    for node in reversed(unnamed):
        name = node.name = page_name(name, node.chunk)
    return name


class PrefixHit(NamedTuple):
    """The result of `match`: `nodes` to share, then `partial` tokens inside `source`; `length` tokens in
    all."""

    nodes: list[PageNode]
    source: PageNode | None
    partial: int
    length: int


class CacheObserver(Protocol):
    """Gets the pages that are published and removed."""

    def stored(self, root: TrieRoot, node: PageNode) -> None:
        """A page was published."""

    def removed(self, node: PageNode) -> None:
        """A page was removed."""


class CacheHandle:
    """What one running sequence holds in the cache. `nodes[i]` has the tokens of its page i."""

    __slots__ = ("nodes", "root")

    def __init__(self, root: TrieRoot, nodes: list[PageNode]) -> None:
        self.root = root
        self.nodes = nodes


MISS = PrefixHit([], None, 0, 0)


class PrefixCache:
    """The trie, and the page memory: if no page is free, pages that no sequence holds are evicted."""

    __slots__ = ("_evictable", "_page_size", "_pool", "_roots", "_whole", "evicts", "observer")

    def __init__(self, pool: PagePool, page_size: int, *, whole: bool = False) -> None:
        """`whole`: see MemoryLayout."""
        self._whole = whole
        self.observer: CacheObserver | None = None
        self.evicts: Callable[[PageNode], None] | None = None  # called before `allocate` evicts a page
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[RootKey, TrieRoot] = {}
        self._evictable: OrderedDict[PageNode, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Pages that can be allocated: free ones and those that only the cache holds."""
        return self._pool.free + len(self._evictable)

    def can_allocate(self, count: int) -> bool:
        """Whether `count` pages are free or can be freed by eviction."""
        return count <= self.available

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, and evict the least recently used ones if necessary. Call `can_allocate`
        first."""
        while not self._pool.can_allocate(count):
            assert self._evictable, (
                f"{count} pages are needed, {self._pool.free} are free, none can be evicted"
            )
            node, _ = self._evictable.popitem(last=False)
            if self.evicts is not None:
                self.evicts(node)
            self._drop(node)
        return self._pool.allocate(count)

    def take_runs(self, count: int, run: int) -> list[int]:
        """Take up to `count` runs of `run` pages that no sequence holds.

        Runs without cached pages go first, starting at the end, then the least recently used ones. Their
        cached pages are dropped, with the pages that follow these in the trie. The first run is never taken:
        all layers begin in it, see `kernels.memory.Memory.reserve`.
        """
        if not count:
            return []
        found, latest = self._pool.free_by_run(run), dict[int, int]()
        for age, node in enumerate(self._evictable):
            found[node.page // run] += 1
            latest[node.page // run] = age
        whole = [number for number, pages in found.items() if number and pages == run]
        chosen = set(nsmallest(count, whole, key=lambda number: (latest.get(number, -1), -number)))
        for node in [node for node in self._evictable if node.page // run in chosen]:
            self._forget(node)
        pages = [page for number in sorted(chosen) for page in range(number * run, (number + 1) * run)]
        self._pool.take(pages)
        return pages

    def match(self, key: RootKey, tokens: tuple[Token, ...]) -> PrefixHit:
        """The longest computed prefix of `tokens`, at most all but one: the logits of the last one are
        needed."""
        root = self._roots.get(key)
        if root is None:
            return MISS
        size, limit = self._page_size, len(tokens) - 1
        here: TrieNode = root
        nodes: list[PageNode] = []
        length = 0
        while length + size <= limit:
            node = here.children.get(tokens[length : length + size])
            if node is None:
                break
            nodes.append(node)
            here = node
            length += size
        if self._whole:
            return PrefixHit(nodes, None, 0, length)
        source, partial = self._match_inside(here, tokens, length, limit)
        return PrefixHit(nodes, source, partial, length + partial)

    def handle(self, key: RootKey, hit: PrefixHit, *, copy: bool) -> CacheHandle:
        """Hold the hit's nodes and a reference to each of their pages. With `copy`, also pin its source."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = TrieRoot(key)
        root.handles += 1
        for node in hit.nodes:
            self.pin(node)
            self._pool.share(node.page)
        if copy and hit.source is not None:
            self.pin(hit.source)
        return CacheHandle(root, list(hit.nodes))

    def pin(self, node: PageNode) -> None:
        """Keep the node from eviction. Its parent must be held."""
        if not node.handles:
            del self._evictable[node]
        node.handles += 1

    def unpin(self, node: PageNode) -> None:
        """Undo `pin`. The node is then the most recently used."""
        node.handles -= 1
        if not node.handles:
            self._evictable[node] = None

    def publish(self, handle: CacheHandle, chunk: tuple[Token, ...], page: int) -> None:
        """The handle's next page is full and computed, so others may find it.

        If another sequence published the same tokens first, its node stays and this page stays private.
        """
        here: TrieNode = handle.nodes[-1] if handle.nodes else handle.root
        node = here.children.get(chunk)
        if node is None:
            node = here.children[chunk] = PageNode(chunk, page, here)
            node.handles = 1
            self._pool.share(page)
            if self.observer is not None:
                self.observer.stored(handle.root, node)
        else:
            self.pin(node)
        handle.nodes.append(node)

    def release(self, handle: CacheHandle, pages: list[int], *, keep: bool = True) -> None:
        """Release a handle and the references to `pages`.

        Without `keep`, nodes that only this handle held are dropped, because their KV may be wrong.
        """
        for node in reversed(handle.nodes):
            node.handles -= 1
            if node.handles:
                continue
            if keep or node.children:
                self._evictable[node] = None
            else:
                self._drop(node)
        handle.root.handles -= 1
        self._drop_if_unused(handle.root)
        for page in reversed(pages):
            self._pool.release(page)

    def is_evictable(self, node: PageNode) -> bool:
        """Whether the node is in the cache and no sequence holds it."""
        return node in self._evictable

    def holds(self, page: int) -> bool:
        """Whether the page is in the cache. Walks the trie; only for checks."""
        return any(node.page == page for node in self._nodes())

    def check_integrity(self, handles: list[CacheHandle], pages: list[int]) -> None:
        """Compare with the truth: all current handles, and a page once for each reference that a sequence
        holds.

        Raises AssertionError, which says which page or node is wrong.
        """
        used: dict[int, int] = {}
        for handle in handles:
            for branch in (handle.root, *handle.nodes):
                used[id(branch)] = used.get(id(branch), 0) + 1
        cached = list(self._nodes())
        for key, root in self._roots.items():
            expected = used.pop(id(root), 0)
            assert root.handles == expected, f"root {key}: {root.handles} handles, {expected} holders"
            assert root.children or expected, f"root {key} outlives its pages"
        for node in cached:
            expected = used.pop(id(node), 0)
            assert node.handles == expected, f"page {node.page}: {node.handles} handles, {expected} holders"
            assert (node in self._evictable) == (not expected), (
                f"page {node.page} has {expected} handles and the wrong evictable state"
            )
        assert not used, f"{len(used)} held nodes are not in the cache"
        assert len(self._evictable) <= len(cached), "an evictable node is not in the cache"
        seen: set[PageNode] = set()
        for node in self._evictable:
            assert seen.issuperset(node.children.values()), (
                f"page {node.page} would be evicted before its children"
            )
            seen.add(node)
        self._pool.check_integrity([*pages, *(node.page for node in cached)])

    def _match_inside(
        self, here: TrieNode, tokens: tuple[Token, ...], start: int, limit: int
    ) -> tuple[PageNode | None, int]:
        """The child that agrees with the most tokens from `start` to `limit`, and how many."""
        wanted = tokens[start : min(start + self._page_size, limit)]
        if not wanted:
            return None, 0
        whole = here.children.get(tokens[start : start + self._page_size])
        if whole is not None:
            return whole, len(wanted)
        best, longest = None, 0
        for node in islice(reversed(here.children.values()), _SCAN):
            common = _common(node.chunk, wanted)
            if common > longest:
                best, longest = node, common
        return best, longest

    def _forget(self, node: PageNode) -> None:
        """Evict a node that no sequence holds, with its descendants. Does nothing if it is gone already."""
        if node not in self._evictable:
            return
        branches = [node]
        for branch in branches:
            branches += branch.children.values()
        for branch in reversed(branches):
            del self._evictable[branch]
            self._drop(branch)

    def _drop(self, node: PageNode) -> None:
        if self.observer is not None:
            self.observer.removed(node)
        parent = node.parent
        del parent.children[node.chunk]
        self._pool.release(node.page)
        if isinstance(parent, TrieRoot):
            self._drop_if_unused(parent)

    def _drop_if_unused(self, root: TrieRoot) -> None:
        if not root.handles and not root.children:
            del self._roots[root.key]

    def _nodes(self) -> Iterator[PageNode]:
        open_branches: list[TrieNode] = list(self._roots.values())
        while open_branches:
            for node in open_branches.pop().children.values():
                yield node
                open_branches.append(node)


def _common(a: tuple[Token, ...], b: tuple[Token, ...]) -> int:
    """How many leading tokens agree."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
