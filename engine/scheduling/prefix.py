"""Automatic prefix cache: computed KV pages, found again by what they were computed from.

The cache is a trie of full pages. A root stands for a tagged tuple of tenant salt and adapter digest. An edge
stands for the `page_size` tokens of one page, which are compared token by token, never by hash alone. So by
construction no tenant can hit another's pages, and no adapter another's. An adapter that is only active from
some token on (activated LoRA) begins at the base's root, and the token where it becomes active carries its
digest.

A running sequence holds a `CacheHandle`: the path of nodes for its own full pages. If a node is held, so are
its ancestors. A handle is released from its deep end. So in the order of last use an unheld child always
comes before its unheld parent, and the least recently used unheld node is always a leaf: eviction is one pop.

A tree belongs to a tenant. Eviction takes from the tenant that has the most pages for its weight, so no
tenant within its share loses a page to another. Of that tenant, the pages that a session keeps go last
(`sessions.py`). If a session keeps a node, it keeps its ancestors.

Full pages are shared by reference. A hit that ends inside a page is served by copying that page
(copy-on-write): the caller gets the node to copy from, pinned until `unpin`.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace, nsmallest
from itertools import islice
from typing import NamedTuple, Protocol

from personae.engine.plan import PageKey, PageOwner
from personae.engine.scheduling.page_names import (
    RootKey,
    Token,
    chunk_bytes,
    chunk_tokens,
    page_name,
    root_name,
    tenant_digest,
)
from personae.engine.scheduling.pages import PagePool

_SCAN = 16  # children examined for a hit inside a page, youngest first


class TenantPages:
    """A tenant's pages: `pages` of them, those of its running sequences included, below `roots` roots.
    No sequence holds the pages in `evictable` and `kept`, the least recently used first. A session keeps
    the pages in `kept`."""

    __slots__ = ("digest", "evictable", "kept", "name", "pages", "roots", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.digest: bytes | None = None  # until `owner_of` has computed it
        self.weight = 1.0
        self.pages = self.roots = 0
        self.evictable: OrderedDict[PageNode, None] = OrderedDict()
        self.kept: OrderedDict[PageNode, None] = OrderedDict()

    def list_of(self, node: "PageNode") -> "OrderedDict[PageNode, None]":
        """Where the node is while no sequence holds it."""
        return self.kept if node.keepers else self.evictable

    @property
    def next(self) -> "PageNode | None":
        """The page to evict first."""
        return next(iter(self.evictable or self.kept), None)


class TrieNode:
    """A node of the trie, in the tree of `tenant`. `handles` counts the running sequences whose path includes
    it. `name` is None until `name_of` has computed it."""

    __slots__ = ("children", "handles", "name", "tenant")

    def __init__(self, tenant: TenantPages) -> None:
        self.children: dict[tuple[Token, ...], PageNode] = {}
        self.handles = 0
        self.name: bytes | None = None
        self.tenant = tenant


class TrieRoot(TrieNode):
    """The root of one (salt, adapter)."""

    __slots__ = ("key",)

    def __init__(self, key: RootKey, tenant: TenantPages) -> None:
        super().__init__(tenant)
        self.key = key


class PageNode(TrieNode):
    """One full page of KV: its tokens `chunk`, its page id `page`, and the node before it, `parent`. One that
    was adopted may not be full. `keepers` counts the sessions that keep it, `tips` are those whose last page
    it is. `released` is a number that grows with each release. `stored`: a tier got it. `durable`: a tier may
    get it, as a page of `session` if that is not empty."""

    __slots__ = ("chunk", "durable", "keepers", "page", "parent", "released", "session", "stored", "tips")

    def __init__(self, chunk: tuple[Token, ...], page: int, parent: TrieNode) -> None:
        super().__init__(parent.tenant)
        self.chunk = chunk
        self.page = page
        self.parent = parent
        self.keepers = 0
        self.tips: list[KeptPath] | None = None
        self.released = 0
        self.stored = self.durable = False
        self.session = b""


class KeptPath:
    """The pages that a session keeps: `tip` and those before it. When `tip` is evicted, the page before it
    takes its place; None: nothing is left."""

    __slots__ = ("tip",)

    def __init__(self) -> None:
        self.tip: PageNode | None = None

    def nodes(self) -> "list[PageNode]":
        """The pages, the last one first."""
        found: list[PageNode] = []
        node: TrieNode | None = self.tip
        while isinstance(node, PageNode):
            found.append(node)
            node = node.parent
        return found


def key_of(node: PageNode) -> PageKey:
    """The page as tiers know it."""
    return PageKey(name_of(node), name_of(node.parent), chunk_bytes(node.chunk))


def owner_of(node: PageNode) -> PageOwner:
    """The page's tenant as tiers know it."""
    tenant = node.tenant
    if tenant.digest is None:
        tenant.digest = tenant_digest(tenant.name)
    return PageOwner(tenant.digest, tenant.weight, node.session)


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


class Ledger(Protocol):
    """Hears of each page that leaves the cache, before anything else gets it: see `page_ledger.py`."""

    def clear(self, page: int) -> None:
        """The page is about to hold something else."""


class CacheHandle:
    """What one running sequence holds in the cache. `nodes[i]` has the tokens of its page i."""

    __slots__ = ("nodes", "root")

    def __init__(self, root: TrieRoot, nodes: list[PageNode]) -> None:
        self.root = root
        self.nodes = nodes


MISS = PrefixHit([], None, 0, 0)


class PrefixCache:
    """The trie, and the page memory: if no page is free, pages that no sequence holds are evicted."""

    __slots__ = (
        "_page_size",
        "_pool",
        "_releases",
        "_roots",
        "_scanned",
        "_tenants",
        "_unheld",
        "_whole",
        "evicts",
        "kept",
        "ledger",
        "observer",
    )

    def __init__(self, pool: PagePool, page_size: int, *, whole: bool = False) -> None:
        """`whole`: see MemoryLayout."""
        self._whole = whole
        self.observer: CacheObserver | None = None
        self.ledger: Ledger | None = None
        self.evicts: Callable[[PageNode], None] | None = None  # called before `allocate` evicts a page
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[RootKey, TrieRoot] = {}
        self._tenants: dict[str, TenantPages] = {}  # those that have a root
        self._unheld = 0  # pages that no sequence holds
        self._releases = 0
        self._scanned = _SCAN  # more if a page has more adopted children that are not full
        self.kept = 0  # pages that sessions keep

    @property
    def available(self) -> int:
        """Pages that can be allocated: free ones and those that only the cache holds."""
        return self._pool.free + self._unheld

    def can_allocate(self, count: int) -> bool:
        """Whether `count` pages are free or can be freed by eviction."""
        return count <= self.available

    def allocate(self, handle: CacheHandle, count: int) -> list[int]:
        """Take `count` pages for the holder of the handle, and evict some if necessary. Call `can_allocate`
        first."""
        tenant = handle.root.tenant
        tenant.pages += count
        if not self._pool.can_allocate(count):
            self._evict(count)
        return self._pool.allocate(count)

    def free(self, handle: CacheHandle, page: int) -> None:
        """Release the reference of the handle's holder to an empty page."""
        handle.root.tenant.pages -= self._pool.release(page)

    def _evict(self, count: int) -> None:
        """Evict until `count` pages are free, each time from the tenant that has, or is about to have, the
        most for its weight: the page that is used least recently."""
        heap = [
            (-tenant.pages / tenant.weight, node.released, node)
            for tenant in self._tenants.values()
            if (node := tenant.next) is not None
        ]
        heapify(heap)
        while not self._pool.can_allocate(count):
            assert heap, f"{count} pages are needed, {self._pool.free} are free, none can be evicted"
            node = heap[0][2]
            tenant = node.tenant
            del (tenant.kept if node.keepers else tenant.evictable)[node]
            self._unheld -= 1
            if self.evicts is not None:
                self.evicts(node)
            self._drop(node)
            following = tenant.next
            if following is None:
                heappop(heap)
            elif len(heap) == 1:
                heap[0] = 0.0, 0, following
            else:
                heapreplace(heap, (-tenant.pages / tenant.weight, following.released, following))

    def take_runs(self, count: int, run: int) -> list[int]:
        """Take up to `count` runs of `run` pages that no sequence holds.

        Runs without cached pages go first, starting at the end, then the least recently used ones, then those
        with pages that sessions keep. Their cached pages are dropped, with the pages that follow these in the
        trie. The first run is never taken: all layers begin in it, see `kernels.memory.Memory.reserve`.
        """
        if not count:
            return []
        found, latest = self._pool.free_by_run(run), dict[int, tuple[bool, int]]()
        unheld = [
            node
            for tenant in self._tenants.values()
            for nodes in (tenant.evictable, tenant.kept)
            for node in nodes
        ]
        for node in unheld:
            number = node.page // run
            found[number] += 1
            latest[number] = max(latest.get(number, (False, -1)), (node.keepers > 0, node.released))
        whole = [number for number, pages in found.items() if number and pages == run]
        chosen = set(nsmallest(count, whole, key=lambda number: (latest.get(number, (False, -1)), -number)))
        for node in unheld:
            if node.page // run in chosen:
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

    def find(self, root: bytes, chunks: Sequence[bytes]) -> tuple[RootKey | None, list[PageNode]]:
        """The key of the root with this name, and the pages below it that have these tokens, for as long as
        there are such pages. None: there is no such root."""
        found = next((each for each in self._roots.values() if name_of(each) == root), None)
        if found is None:
            return None, []
        here: TrieNode = found
        nodes: list[PageNode] = []
        for chunk in chunks:
            node = _child(here, chunk)
            if node is None:
                break
            nodes.append(node)
            here = node
        return found.key, nodes

    def handle(
        self, key: RootKey, hit: PrefixHit, *, copy: bool, tenant: str = "default", weight: float = 1.0
    ) -> CacheHandle:
        """Hold the hit's nodes and a reference to each of their pages. With `copy`, also pin its source. A
        new root belongs to `tenant`, whose weight is `weight` from now on."""
        root = self._root(key, tenant)
        root.tenant.weight = weight
        root.handles += 1
        evictable, kept, share = root.tenant.evictable, root.tenant.kept, self._pool.share
        for node in hit.nodes:
            if not node.handles:
                del (kept if node.keepers else evictable)[node]
                self._unheld -= 1
            node.handles += 1
            share(node.page)
        if copy and hit.source is not None:
            self.pin(hit.source)
        return CacheHandle(root, list(hit.nodes))

    def _root(self, key: RootKey, tenant: str) -> TrieRoot:
        """The root of this key. A new one belongs to `tenant`."""
        root = self._roots.get(key)
        if root is None:
            if tenant not in self._tenants:
                self._tenants[tenant] = TenantPages(tenant)
            root = self._roots[key] = TrieRoot(key, self._tenants[tenant])
            root.tenant.roots += 1
        return root

    def adopt(
        self,
        roots: Sequence[tuple[RootKey, str]],
        pages: Mapping[bytes, Sequence[tuple[int, tuple[int, ...]]]],
    ) -> list[int]:
        """Put pages into the cache that an engine before this one has computed. `roots`: their roots' keys
        and tenants. `pages`: each with its tokens, by the name of the page or root that it follows. A page
        may have fewer tokens than others; then it is only copied, and nothing follows it. Returns the pages
        that are in the cache now. Call it while the cache is empty."""
        adopted: list[PageNode] = []
        for key, tenant in roots:
            root = self._root(key, tenant)
            open_branches: list[TrieNode] = [root]
            for here in open_branches:
                partial = 0
                for page, chunk in pages.get(name_of(here), ()):
                    if chunk in here.children:
                        continue
                    node = here.children[chunk] = PageNode(chunk, page, here)
                    adopted.append(node)
                    if self._is_full(node):
                        open_branches.append(node)
                        if self.observer is not None:
                            self.observer.stored(root, node)
                    else:
                        partial += 1
                self._scanned = max(self._scanned, partial)
            self._drop_if_unused(root)
        self._pool.take([node.page for node in adopted])
        for node in reversed(adopted):  # a branch's last page first, since it is evicted first
            node.tenant.pages += 1
            self._add_unheld(node)
        return [node.page for node in adopted]

    def _is_full(self, node: PageNode) -> bool:
        return len(node.chunk) == self._page_size

    def pin(self, node: PageNode) -> None:
        """Keep the node from eviction. Its parent must be held."""
        if not node.handles:
            self._take_unheld(node)
        node.handles += 1

    def unpin(self, node: PageNode) -> None:
        """Undo `pin`. The node is then the most recently used."""
        node.handles -= 1
        if not node.handles:
            self._add_unheld(node)

    def _add_unheld(self, node: PageNode) -> None:
        self._releases += 1
        node.released = self._releases
        node.tenant.list_of(node)[node] = None
        self._unheld += 1

    def _take_unheld(self, node: PageNode) -> None:
        del node.tenant.list_of(node)[node]
        self._unheld -= 1

    def keep(self, path: KeptPath, handle: CacheHandle) -> None:
        """Have a session keep the pages that the handle holds, and no others. Within their tenant's, they are
        evicted after all that no session keeps."""
        tip = handle.nodes[-1] if handle.nodes else None
        for node in handle.nodes:
            self.kept += not node.keepers
            node.keepers += 1
        self.unkeep(path)
        path.tip = tip
        if tip is not None:
            tip.tips = [*(tip.tips or ()), path]

    def unkeep(self, path: KeptPath) -> None:
        """Undo `keep`: the session's pages are like others, as if they had been used just now."""
        node: TrieNode | None = path.tip
        if path.tip is not None:
            path.tip.tips = [other for other in path.tip.tips or () if other is not path] or None
            path.tip = None
        while isinstance(node, PageNode):
            if not node.handles:
                self._take_unheld(node)
            node.keepers -= 1
            self.kept -= not node.keepers
            if not node.handles:
                self._add_unheld(node)
            node = node.parent

    def drop_unused(self, nodes: Sequence[PageNode]) -> Sequence[PageNode]:
        """Remove those of the nodes from the cache that nobody holds, keeps or continues. `nodes` is a path,
        its deep end first. Returns the others."""
        for place, node in enumerate(nodes):
            if node.children or node.keepers or not self.is_evictable(node):
                return nodes[place:]  # so those before it are continued
            self._take_unheld(node)
            self._drop(node)
        return ()

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
        tenant = handle.root.tenant
        evictable, kept, releases = tenant.evictable, tenant.kept, self._releases
        for node in reversed(handle.nodes):
            node.handles -= 1
            if node.handles:
                continue
            if keep or node.children:
                releases += 1
                node.released = releases
                (kept if node.keepers else evictable)[node] = None
            else:
                self._drop(node)
        self._unheld += releases - self._releases
        self._releases = releases
        tenant.pages -= sum(map(self._pool.release, reversed(pages)))
        handle.root.handles -= 1
        self._drop_if_unused(handle.root)

    def is_evictable(self, node: PageNode) -> bool:
        """Whether the node is in the cache and no sequence holds it."""
        return node in node.tenant.list_of(node)

    def holds(self, page: int) -> bool:
        """Whether the page is in the cache. Walks the trie; only for checks."""
        return any(node.page == page for node in self.nodes())

    def check_integrity(
        self, handles: list[CacheHandle], pages: list[int], lent: Collection[int] = ()
    ) -> None:
        """Compare with the truth: all current handles, a page once for each reference that a sequence holds,
        and the pages that are lent.

        Raises AssertionError, which says which page or node is wrong.
        """
        used: dict[int, int] = {}
        for handle in handles:
            for branch in (handle.root, *handle.nodes):
                used[id(branch)] = used.get(id(branch), 0) + 1
        cached = list(self.nodes())
        unheld = [node for tenant in self._tenants.values() for node in (*tenant.evictable, *tenant.kept)]
        for key, root in self._roots.items():
            expected = used.pop(id(root), 0)
            assert root.handles == expected, f"root {key}: {root.handles} handles, {expected} holders"
            assert root.children or expected, f"root {key} outlives its pages"
        for node in cached:
            expected = used.pop(id(node), 0)
            assert node.handles == expected, f"page {node.page}: {node.handles} handles, {expected} holders"
            assert self.is_evictable(node) == (not expected), (
                f"page {node.page} has {expected} handles and the wrong evictable state"
            )
            tips = len(node.tips or ())
            kept = tips + sum(child.keepers for child in node.children.values())
            assert node.keepers == kept, f"page {node.page}: {node.keepers} keepers, {kept} sessions"
        assert not used, f"{len(used)} held nodes are not in the cache"
        assert len(unheld) == self._unheld <= len(cached), "an evictable node is not in the cache"
        assert self.kept == sum(node.keepers > 0 for node in cached), f"{self.kept} pages are kept"
        roots = Counter(root.tenant for root in self._roots.values())
        for tenant in self._tenants.values():
            assert tenant.roots == roots.pop(tenant), f"{tenant.name!r} has {tenant.roots} roots"
        assert not roots, f"the tenants of {len(roots)} roots are not known"
        seen: set[PageNode] = set()
        for node in unheld:
            assert seen.issuperset(node.children.values()), (
                f"page {node.page} would be evicted before its children"
            )
            seen.add(node)
        self._pool.check_integrity([*pages, *lent, *(node.page for node in cached)])
        counted = sum(tenant.pages for tenant in self._tenants.values())
        owned = len({*pages, *(node.page for node in cached)})
        assert counted == owned, f"tenants have {counted} pages, not {owned}"

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
        for node in islice(reversed(here.children.values()), self._scanned):
            common = _common(node.chunk, wanted)
            if common > longest:
                best, longest = node, common
        return best, longest

    def _forget(self, node: PageNode) -> None:
        """Evict a node that no sequence holds, with its descendants. Does nothing if it is gone already."""
        if not self.is_evictable(node):
            return
        branches = [node]
        for branch in branches:
            branches += branch.children.values()
        for branch in reversed(branches):
            self._take_unheld(branch)
            self._drop(branch)

    def _drop(self, node: PageNode) -> None:
        if self.observer is not None and self._is_full(node):
            self.observer.removed(node)
        if self.ledger is not None:
            self.ledger.clear(node.page)
        parent = node.parent
        del parent.children[node.chunk]
        node.tenant.pages -= self._pool.release(node.page)
        if node.tips is not None:
            self._shorten(node.tips, parent)
            node.tips = None
        self.kept -= node.keepers > 0
        node.keepers = 0
        if isinstance(parent, TrieRoot):
            self._drop_if_unused(parent)

    def _shorten(self, paths: list[KeptPath], parent: TrieNode) -> None:
        """The last page of these sessions is gone: `parent` is now the last."""
        tip = parent if isinstance(parent, PageNode) else None
        for path in paths:
            path.tip = tip
        if tip is not None:
            tip.tips = [*(tip.tips or ()), *paths]

    def _drop_if_unused(self, root: TrieRoot) -> None:
        if not root.handles and not root.children:
            del self._roots[root.key]
            root.tenant.roots -= 1
            if not root.tenant.roots:
                del self._tenants[root.tenant.name]

    def nodes(self) -> Iterator[PageNode]:
        """All pages in the cache. Only for checks."""
        open_branches: list[TrieNode] = list(self._roots.values())
        while open_branches:
            for node in open_branches.pop().children.values():
                yield node
                open_branches.append(node)


def _child(node: TrieNode, chunk: bytes) -> PageNode | None:
    """The child with these tokens, given as `chunk_bytes` makes them."""
    if (tokens := chunk_tokens(chunk)) is not None:
        return node.children.get(tokens)
    return next((each for each in node.children.values() if chunk_bytes(each.chunk) == chunk), None)


def _common(a: tuple[Token, ...], b: tuple[Token, ...]) -> int:
    """How many leading tokens agree."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
