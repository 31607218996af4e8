"""Automatic prefix cache: pages of computed KV, found again by what they were computed from.

A trie of full pages. A root stands for a tagged tuple of tenant salt and adapter digest, an edge for the
`page_size` tokens of one page, compared token by token, never by hash alone. So one tenant cannot hit
another's pages, nor one adapter another's, by construction. An adapter that is active only from some token
on (activated LoRA) begins at the base's root, and the token where it becomes active carries its digest.

A running sequence holds a `CacheHandle`: the path of nodes that its own full pages correspond to. A node that
is leased has leased ancestors. A lease is given back from its deep end, so among unleased nodes a child
always comes before its parent in order of last use, and the least recently used unleased node is always a
leaf: eviction is one pop.

Pages are shared by reference as long as they are full. A hit that ends inside a page is served by copying
that page (copy-on-write): the caller gets the node to copy from, pinned until `unpin`.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple, Protocol

from personae.engine.scheduling.pages import PagePool

RootKey = tuple[str, bytes] | tuple[str, bytes, str]
Token = int | tuple[str, int]
"""A token id; with an adapter's digest where that adapter becomes active (see `LiveSequence.cache_key`)."""
_SCAN = 16  # children looked at for a hit inside a page, youngest first


def root_key(salt: bytes, adapter: str | None) -> RootKey:
    """The tagged key that separates tenants and adapters; the base model has a tag of its own."""
    return ("base", salt) if adapter is None else ("adapter", salt, adapter)


class TrieNode:
    """A place where pages may follow. `handles` counts the running sequences whose path comes through
    here."""

    __slots__ = ("children", "handles")

    def __init__(self) -> None:
        self.children: dict[tuple[Token, ...], PageNode] = {}
        self.handles = 0


class TrieRoot(TrieNode):
    """Where one (salt, adapter) begins."""

    __slots__ = ("key",)

    def __init__(self, key: RootKey) -> None:
        super().__init__()
        self.key = key


class PageNode(TrieNode):
    """One full page of KV: `chunk` are its tokens, `page` holds it; what comes before it is `parent`."""

    __slots__ = ("chunk", "page", "parent")

    def __init__(self, chunk: tuple[Token, ...], page: int, parent: TrieNode) -> None:
        super().__init__()
        self.chunk = chunk
        self.page = page
        self.parent = parent


class PrefixHit(NamedTuple):
    """What `match` found: `nodes` to share, then `partial` tokens inside `source`; `length` tokens in all."""

    nodes: list[PageNode]
    source: PageNode | None
    partial: int
    length: int


class CacheObserver(Protocol):
    """Is told what can be found, and what no longer."""

    def stored(self, root: TrieRoot, node: PageNode) -> None:
        """A page can be found."""

    def removed(self, node: PageNode) -> None:
        """A page is forgotten."""


class CacheHandle:
    """What one running sequence holds in the cache. `nodes[i]` has the tokens of its page i."""

    __slots__ = ("nodes", "root")

    def __init__(self, root: TrieRoot, nodes: list[PageNode]) -> None:
        self.root = root
        self.nodes = nodes


MISS = PrefixHit([], None, 0, 0)


class PrefixCache:
    """The trie, and with it the memory: pages that nobody leases are given out when no free ones are left."""

    __slots__ = ("_page_size", "_pool", "_roots", "_unleased", "observer")

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.observer: CacheObserver | None = None
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[RootKey, TrieRoot] = {}
        self._unleased: OrderedDict[PageNode, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Pages that can be allocated: the free ones and those that only the cache holds."""
        return self._pool.free + len(self._unleased)

    def can_allocate(self, count: int) -> bool:
        """Whether `count` pages are free or can be freed by eviction."""
        return count <= self.available

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, evicting the least recently used ones if need be. Ask `can_allocate` first."""
        while not self._pool.can_allocate(count):
            assert self._unleased, f"{count} pages wanted, {self._pool.free} free, nothing left to evict"
            node, _ = self._unleased.popitem(last=False)
            self._drop(node)
        return self._pool.allocate(count)

    def take_runs(self, count: int, run: int) -> list[int]:
        """Take up to `count` runs of `run` pages of which nobody holds one: those where nothing is cached,
        the last first, then those that were used least recently. What is cached there is forgotten, and
        what follows it. The first run stays: all layers begin in it, see `kernels.memory.Memory.reserve`."""
        if not count:
            return []
        found, latest = self._pool.free_by_run(run), dict[int, int]()
        for age, node in enumerate(self._unleased):
            found[node.page // run] += 1
            latest[node.page // run] = age
        whole = [number for number, pages in found.items() if number and pages == run]
        chosen = set(nsmallest(count, whole, key=lambda number: (latest.get(number, -1), -number)))
        for node in [node for node in self._unleased if node.page // run in chosen]:
            self._forget(node)
        pages = [page for number in sorted(chosen) for page in range(number * run, (number + 1) * run)]
        self._pool.take(pages)
        return pages

    def match(self, key: RootKey, tokens: tuple[Token, ...]) -> PrefixHit:
        """The longest computed prefix of `tokens`, one token short of all: that one's logits are needed."""
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
        source, partial = self._match_inside(here, tokens, length, limit)
        return PrefixHit(nodes, source, partial, length + partial)

    def handle(self, key: RootKey, hit: PrefixHit, *, copy: bool) -> CacheHandle:
        """Hold the hit's nodes and a reference to each of their pages; with `copy`, pin its source, too."""
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
        """Keep the node from eviction. Its parent must be leased."""
        if not node.handles:
            del self._unleased[node]
        node.handles += 1

    def unpin(self, node: PageNode) -> None:
        """Undo `pin`: the node is now the most recently used."""
        node.handles -= 1
        if not node.handles:
            self._unleased[node] = None

    def publish(self, handle: CacheHandle, chunk: tuple[Token, ...], page: int) -> None:
        """The lease's next page is full and computed: others may find it.

        Where another sequence has published the same tokens first, its node stays and this page stays
        private.
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
        """Give back a lease and the references to `pages`.

        Without `keep`, nodes that only this lease held are dropped: their KV is not to be trusted.
        """
        for node in reversed(handle.nodes):
            node.handles -= 1
            if node.handles:
                continue
            if keep or node.children:
                self._unleased[node] = None
            else:
                self._drop(node)
        handle.root.handles -= 1
        self._drop_if_bare(handle.root)
        for page in reversed(pages):
            self._pool.release(page)

    def holds(self, page: int) -> bool:
        """Whether the page is in the cache; walks the trie, for checks only."""
        return any(node.page == page for node in self._nodes())

    def check_integrity(self, handles: list[CacheHandle], pages: list[int]) -> None:
        """Compare with the truth: all leases in force, and a page once for each reference a sequence holds.

        Raises AssertionError that says which page or node is wrong.
        """
        used: dict[int, int] = {}
        for handle in handles:
            for branch in (handle.root, *handle.nodes):
                used[id(branch)] = used.get(id(branch), 0) + 1
        cached = list(self._nodes())
        for key, root in self._roots.items():
            expected = used.pop(id(root), 0)
            assert root.handles == expected, f"root {key}: {root.handles} leases, {expected} holders"
            assert root.children or expected, f"root {key} outlives its pages"
        for node in cached:
            expected = used.pop(id(node), 0)
            assert node.handles == expected, f"page {node.page}: {node.handles} leases, {expected} holders"
            assert (node in self._unleased) == (not expected), (
                f"page {node.page} with {expected} leases: evictable?"
            )
        assert not used, f"{len(used)} leased nodes are not in the cache"
        assert len(self._unleased) <= len(cached), "an evictable node is not in the cache"
        seen: set[PageNode] = set()
        for node in self._unleased:
            assert seen.issuperset(node.children.values()), (
                f"page {node.page} would go before what follows it"
            )
            seen.add(node)
        self._pool.check_integrity([*pages, *(node.page for node in cached)])

    def _match_inside(
        self, here: TrieNode, tokens: tuple[Token, ...], start: int, limit: int
    ) -> tuple[PageNode | None, int]:
        """The child that agrees longest with the tokens from `start` to `limit`, and how far."""
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
        """Evict a node that nobody leases, and what follows it; nothing if it has gone already."""
        if node not in self._unleased:
            return
        branches = [node]
        for branch in branches:
            branches += branch.children.values()
        for branch in reversed(branches):
            del self._unleased[branch]
            self._drop(branch)

    def _drop(self, node: PageNode) -> None:
        if self.observer is not None:
            self.observer.removed(node)
        parent = node.parent
        del parent.children[node.chunk]
        self._pool.release(node.page)
        if isinstance(parent, TrieRoot):
            self._drop_if_bare(parent)

    def _drop_if_bare(self, root: TrieRoot) -> None:
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
