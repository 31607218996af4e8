"""What running sequences hold: slots, pages and cache handles. `take_slot` gives them, `give_up_slot` takes
them."""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from personae.engine.plan import FetchPage, ForgetSession, MemoryLayout, Move, PageKey, StorePage
from personae.engine.scheduling.live import LiveSequence, SequenceState, StagedPages
from personae.engine.scheduling.page_ledger import PageLedger
from personae.engine.scheduling.page_names import page_keys, session_digest, tenant_digest
from personae.engine.scheduling.prefix import (
    MISS,
    CacheHandle,
    CacheObserver,
    PageNode,
    PrefixHit,
    key_of,
    name_of,
    owner_of,
)
from personae.engine.scheduling.regions import Region, by_worth
from personae.engine.scheduling.sessions import SessionTable
from personae.engine.tiers.tier import TierIndex

_by_rank = attrgetter("rank")


class HeldPages(NamedTuple):
    """Pages that are kept for another engine, in order, under a number."""

    number: int
    pages: tuple[int, ...]


class RunningTable:
    """The sequences with a slot, in three lists, all by rank: background last, then by admission.

    `prefilling` have a part of their log still to be planned; `decoding` have none; `parked` wait for a mask
    and are not planned. `releases`, `copies`, `reclaimed` and `moves` collect what the next plan must
    contain.
    `background` counts the background sequences. `lent` are the pages whose memory is lent to adapters.
    `sessions` keep pages that no sequence holds.
    `short` is how many pages were missing since it was set to 0. `holds` are pages that are kept for other
    engines, by number. `unwritten` pages are in the cache and get their content only in a step that is not
    committed yet.
    """

    __slots__ = (
        "_admissions",
        "_fetched",
        "_free_slots",
        "_held",
        "_ledger",
        "_page_size",
        "_recalled",
        "_refused",
        "_region_pages",
        "_regions",
        "_run",
        "_sources",
        "_tier",
        "_unstored",
        "background",
        "copies",
        "decoding",
        "holds",
        "lent",
        "moves",
        "parked",
        "prefilling",
        "reclaimed",
        "releases",
        "sessions",
        "short",
        "unwritten",
    )

    def __init__(
        self, layout: MemoryLayout, tier: TierIndex | None = None, ledger: PageLedger | None = None
    ) -> None:
        self._tier = tier
        self._ledger = ledger
        # Pages that no sequence holds and the tier has not got.
        self._unstored: deque[PageNode] = deque(maxlen=layout.num_pages)
        self._page_size = layout.page_size
        self._run = layout.run
        self._region_pages = layout.region_pages
        self._regions = [Region(layout, number) for number in range(layout.regions)]
        if tier is not None and tier.stores:
            self._only.cache.evicts = self._store
        if ledger is not None:
            self._only.cache.ledger = ledger
        self.sessions = SessionTable()
        self._free_slots = list(range(layout.max_seqs - 1, -1, -1))
        self._admissions = 0
        # (order, room, missing pages) of the last sequence that got no slot.
        self._refused: tuple[int, int, int] | None = None
        self._sources: list[PageNode] = []
        self.background = 0
        self.prefilling: list[LiveSequence] = []
        self.decoding: list[LiveSequence] = []
        self.parked: list[LiveSequence] = []
        self.releases: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.reclaimed: list[int] = []
        self.moves: list[Move] = []
        self.lent: set[int] = set()
        self.short = 0
        self.holds: dict[int, CacheHandle] = {}
        self._held = 0
        self.unwritten: set[PageNode] = set()
        self._fetched: list[PageNode] = []  # in the next plan
        self._recalled = 0  # pages that were recalled and are not back yet

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.parked)

    def __iter__(self) -> Iterator[LiveSequence]:
        yield from self.decoding
        yield from self.prefilling
        yield from self.parked

    def observe_cache(self, observer: CacheObserver) -> None:
        """Set the observer of the prefix cache, or of those of all regions."""
        for region in self._regions:
            region.cache.observer = observer

    def adopt(self) -> int:
        """Put into the prefix cache what the ledger says that another engine has left. Returns how many
        pages that is."""
        if self._ledger is None:
            return 0
        found = self._ledger.open()
        adopted = set(self._only.cache.adopt(found.roots, found.pages))
        for page in self._ledger.held():
            if page not in adopted:
                self._ledger.clear(page)
        return len(adopted)

    @property
    def _only(self) -> Region:
        """The region, for what works with one only: lending, tiers, and pages for other engines."""
        (region,) = self._regions
        return region

    def _region_of(self, node: PageNode) -> Region:
        return self._regions[node.page // self._region_pages]

    @property
    def pages_used(self) -> int:
        """Pages that running sequences hold. Cached pages without a reader do not count."""
        return self.pages - sum(region.cache.available for region in self._regions) - len(self.lent)

    def lend(self, count: int) -> tuple[int, ...]:
        """Up to `count` pages that no sequence holds, in whole runs. Their cached content is dropped. One
        page stays for each running sequence to grow into."""
        count = min(count, self._only.room)
        pages = self._only.cache.take_runs(max(count, 0) // self._run, self._run)
        self.lent.update(pages)
        return tuple(pages)

    def recall(self) -> int:
        """How many of the lent pages are needed and were not recalled yet."""
        count = max(min(self.short, len(self.lent)) - self._recalled, 0)
        self._recalled += count
        return count

    def returned(self, pages: Iterable[int]) -> None:
        """Pages that were lent come back."""
        for page in pages:
            self.lent.remove(page)
            self._only.pool.release(page)
            self._recalled = max(self._recalled - 1, 0)

    def last(self, region: Region) -> LiveSequence:
        """The first sequence to preempt if memory is short in a region that has some."""
        if len(self._regions) > 1:
            return max((s for s in self if s.region is region), key=_by_rank)
        tables = (self.decoding, self.prefilling, self.parked)
        return max((table[-1] for table in tables if table), key=_by_rank)

    @property
    def pages(self) -> int:
        """All pages, lent ones included."""
        return sum(region.pool.size for region in self._regions)

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots)

    def last_of(self, tenant: str, region: Region | None = None) -> LiveSequence | None:
        """The tenant's first sequence to preempt, without background ones. `region`: only those in it."""
        theirs = (
            s for s in self if s.key.tenant == tenant and not s.background and region in (None, s.region)
        )
        return max(theirs, key=_by_rank, default=None)

    def displaceable(self) -> LiveSequence | None:
        """The first background sequence to preempt if others need a slot."""
        return max((s for s in self if s.background and not s.settled), key=_by_rank, default=None)

    def has_slot_for(self, sequence: LiveSequence, others: int) -> bool:
        """Whether there are slots for it and `others`, and memory for it even if none of it is cached."""
        needed = self.pages_for(sequence)
        return len(self._free_slots) > others and any(needed <= region.room for region in self._regions)

    @property
    def room(self) -> int:
        """The most pages that a new sequence may take."""
        return max(region.room for region in self._regions)

    def pages_for(self, sequence: LiveSequence) -> int:
        """How many pages it needs if none of it is cached."""
        return -(-len(sequence.tokens) // self._page_size)

    def pages_by_tenant(self) -> Counter[str]:
        """The pages that the running sequences of each tenant hold, without background ones."""
        held = Counter[str]()
        for sequence in self:
            if not sequence.background:
                held[sequence.key.tenant] += len(sequence.pages)
        return held

    def take_slot(self, sequence: LiveSequence) -> bool:
        """Give it a slot and pages for its log, cached ones if possible. False if slots or memory are short.

        One page stays for each running sequence to grow into. Otherwise a preemption would soon follow.
        """
        if not self._free_slots:
            return False
        room = self.room
        if self._refused is not None and self._refused[0] == sequence.order and room <= self._refused[1]:
            self.short = max(self.short, self._refused[2])
            return False
        sequence.log = log = sequence.current_log()
        hits = [MISS] * len(self._regions)
        if sequence.reads_cache:
            key = sequence.cache_key(log.tokens, 0)
            hits = [region.cache.match(sequence.root, key) for region in self._regions]
        missing = 0
        for region, hit in by_worth(self._regions, hits):
            lacks = self._take_pages(sequence, region, hit)
            if not lacks:
                self._refused = None
                return True
            missing = min(missing or lacks, lacks)
        self._refused = (sequence.order, room, missing)
        self.short = max(self.short, missing)
        return False

    def _take_pages(self, sequence: LiveSequence, region: Region, hit: PrefixHit) -> int:
        """Give it a slot and pages of a region, cached ones as the hit says. Returns how many pages are
        missing there; 0 if it has them."""
        log, cache, margin = sequence.log, region.cache, region.sequences
        fresh = -(-len(log.tokens) // self._page_size) - len(hit.nodes)
        fetched = _fetched_behind(sequence.staged, len(hit.nodes))
        handle = cache.handle(sequence.root, hit, copy=not fetched, tenant=log.tenant, weight=log.weight)
        source, cached = hit.source, hit.length
        if fetched:
            source, cached = None, (len(hit.nodes) + fetched) * self._page_size
        if source is not None and not cache.can_allocate(fresh + margin):
            cache.unpin(source)  # the page to copy from is needed as a free page
            source, cached = None, cached - hit.partial
        pages = [node.page for node in hit.nodes]
        if not cache.can_allocate(fresh + margin):
            missing = fresh + margin - cache.available
            cache.release(handle, pages)
            return missing
        pages += cache.allocate(handle, fresh)
        if source is not None:
            self._sources.append(source)
            self.copies.append((source.page, pages[len(hit.nodes)]))
        sequence.place = SequenceState.RUNNING
        sequence.slot = self._free_slots.pop()
        sequence.admitted = self._admissions
        sequence.region = region
        region.sequences += 1
        sequence.handle = handle
        sequence.pages = pages
        sequence.capacity = len(pages) * self._page_size
        sequence.known = len(log.tokens)
        sequence.planned = sequence.computed = cached
        if not sequence.delivered:
            sequence.cached = min(cached, log.prompt_length)
        sequence.publish_at = (len(handle.nodes) + 1) * self._page_size
        self._admissions += 1
        self.background += sequence.background
        insort(self.prefilling, sequence, key=_by_rank)
        if sequence.staged is not None:
            self._use_staged(sequence, len(hit.nodes), fetched)
        return 0

    def _use_staged(self, sequence: LiveSequence, first: int, count: int) -> None:
        """Have the next plan put the sequence's fetched pages from number `first` on into the cache."""
        staged, sequence.staged = sequence.staged, None
        assert staged is not None
        assert self._tier is not None
        if not count:
            self._tier.discard(staged.ticket)  # others computed these pages, or dropped those before
            return
        for number in range(first, first + count):
            self.moves.append(FetchPage(sequence.pages[number], staged.ticket, number - staged.first))
        self._publish(sequence)
        assert sequence.handle is not None
        for node in sequence.handle.nodes[first:]:
            node.stored = True
            self.unwritten.add(node)
            self._fetched.append(node)

    def missing(self, sequence: LiveSequence) -> tuple[int, list[PageKey]]:
        """The pages of a waiting sequence that the tier has and the device has not: the first one's number,
        and their keys. Only those behind the pages on the device, without a gap."""
        assert self._tier is not None
        tokens = sequence.cache_key(tuple(sequence.tokens), 0)
        most = (len(tokens) - 1) // self._page_size  # the logits of the last token are needed
        first = len(self._only.cache.match(sequence.root, tokens).nodes)
        if first >= most:
            return first, []
        if len(sequence.keys) < most:
            sequence.keys = page_keys(sequence.root, tokens[: most * self._page_size], self._page_size)
        end = first
        while end < most and self._tier.has(sequence.keys[end].name, sequence.log.pages_at):
            end += 1
        return first, sequence.keys[first:end]

    def _store(self, node: PageNode) -> None:
        """Have the next plan give a page to the tier, if that may have it, has not got it and has room."""
        assert self._tier is not None
        if node.stored or not node.durable:
            return
        if len(self.moves) < self._tier.room and self._tier.wants(name_of(node)):
            self.moves.append(StorePage(node.page, key_of(node), owner_of(node)))
        node.stored = True

    def store_idle(self, count: int) -> None:
        """Have the next plan give the tier up to `count` pages that no sequence holds."""
        assert self._tier is not None
        while self._unstored and count and len(self.moves) < self._tier.room:
            node = self._unstored.popleft()
            if not node.stored and self._only.cache.is_evictable(node):
                self._store(node)
                count -= 1

    @property
    def has_unstored(self) -> bool:
        """Whether there may be pages for `store_idle`."""
        return bool(self._unstored)

    def keep_session(self, sequence: LiveSequence) -> None:
        """Keep the pages of a sequence that is about to end for its session, if it has one."""
        log, handle, region = sequence.log, sequence.handle, sequence.region
        if log.session is not None and log.session_seconds > 0:
            assert handle is not None
            assert region is not None
            self.sessions.keep(log.tenant, log.session, region.cache, handle, log.session_seconds)

    def forget_session(self, tenant: str, name: str) -> None:
        """See Scheduler."""
        left = self.sessions.forget(tenant, name)
        if self._tier is None or not self._tier.stores:
            return
        session = session_digest(name)
        for node in left:
            if node.session == session:  # it is deleted there, and others use it: they may store it again
                node.session, node.stored = b"", False
                if node.durable:
                    self._unstored.append(node)
        self.moves.append(ForgetSession(tenant_digest(tenant), session))

    @property
    def pages_kept(self) -> int:
        """Pages that sessions keep."""
        return sum(region.cache.kept for region in self._regions)

    def give_up_slot(self, sequence: LiveSequence, *, keep: bool) -> None:
        """Take back what `take_slot`, `grow` and `publish` gave. Without `keep` its pages also leave the
        cache."""
        region = sequence.region
        assert sequence.slot is not None
        assert sequence.handle is not None
        assert region is not None
        self._list_of(sequence).remove(sequence)
        self.releases.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        if self._tier is not None and self._tier.stores and keep and not sequence.log.in_memory:
            name = sequence.log.session
            session = b"" if name is None else session_digest(name)
            for node in reversed(sequence.handle.nodes):
                node.durable = True
                if not node.stored:
                    node.session = node.session or session
                    self._unstored.append(node)
        if self._ledger is not None:
            for page in sequence.pages[len(sequence.handle.nodes) :]:
                self._ledger.clear(page)
        region.cache.release(sequence.handle, sequence.pages, keep=keep)
        region.sequences -= 1
        self.background -= sequence.background
        sequence.slot = sequence.handle = sequence.region = None
        sequence.pages = []
        sequence.planned = sequence.computed = sequence.capacity = sequence.stale = 0
        sequence.parked = False

    def hold(self, root: bytes, chunks: Sequence[bytes]) -> HeldPages:
        """See Scheduler."""
        cache = self._only.cache
        key, nodes = cache.find(root, chunks)
        written = 0
        while written < len(nodes) and nodes[written] not in self.unwritten:
            written += 1
        if key is None or not written:
            return HeldPages(-1, ())
        tenant = nodes[0].tenant
        hit = PrefixHit(nodes[:written], None, 0, written * self._page_size)
        self._held += 1
        self.holds[self._held] = cache.handle(key, hit, copy=False, tenant=tenant.name, weight=tenant.weight)
        return HeldPages(self._held, tuple(node.page for node in hit.nodes))

    def let_go(self, number: int) -> None:
        """See Scheduler."""
        handle = self.holds.pop(number, None)
        if handle is not None:
            self._only.cache.release(handle, [node.page for node in handle.nodes])

    def can_grow(self, sequence: LiveSequence) -> bool:
        """Whether a page can be allocated for it."""
        assert sequence.region is not None
        can = sequence.region.cache.can_allocate(1)
        self.short = max(self.short, not can)
        return can

    def short_region(self) -> Region | None:
        """A region that has no page to spare, besides one for each running sequence to grow into; None if
        there is none."""
        return next((region for region in self._regions if region.room < 1), None)

    def grow(self, sequence: LiveSequence) -> tuple[int]:
        """One more page. Call `can_grow` first."""
        assert sequence.handle is not None
        assert sequence.region is not None
        (page,) = sequence.region.cache.allocate(sequence.handle, 1)
        sequence.pages.append(page)
        sequence.capacity += self._page_size
        return (page,)

    def reclaim(self, wanting: LiveSequence) -> bool:
        """Take back an empty page that another sequence took for drafts. False if there is none."""
        region = wanting.region
        assert region is not None
        for sequence in self.decoding:
            if sequence is wanting or sequence.region is not region:
                continue
            if sequence.capacity - sequence.planned >= self._page_size:
                assert sequence.slot is not None
                assert sequence.handle is not None
                region.cache.free(sequence.handle, sequence.pages.pop())
                sequence.capacity -= self._page_size
                self.reclaimed.append(sequence.slot)
                return True
        return False

    def begin_decoding(self, sequence: LiveSequence) -> None:
        """All of its log has been planned."""
        self.prefilling.remove(sequence)
        insort(self.decoding, sequence, key=_by_rank)

    def unplan(self, sequence: LiveSequence, count: int) -> None:
        """So many positions are not computed: their plan is made again."""
        table = self._list_of(sequence)
        sequence.planned -= count
        if table is not (now := self._list_of(sequence)):
            table.remove(sequence)
            insort(now, sequence, key=_by_rank)

    def pin_again(self, sources: Sequence[PageNode]) -> bool:
        """Keep the pages that a plan copies until it is made again. False if one of them is gone."""
        caches = [self._region_of(node).cache for node in sources]
        pairs = list(zip(caches, sources, strict=True))
        if not all(node.handles or cache.is_evictable(node) for cache, node in pairs):
            return False
        for cache, node in pairs:
            cache.pin(node)
        self._sources += sources
        return True

    def park(self, sequence: LiveSequence, stale: int) -> None:
        """No token was chosen at its last position because its mask is not ready. That position is planned
        again after `unpark`. `stale` rows of it are in flight."""
        self._list_of(sequence).remove(sequence)
        sequence.parked, sequence.stale = True, stale
        sequence.planned = sequence.computed
        insort(self.parked, sequence, key=_by_rank)

    def unpark(self, sequence: LiveSequence) -> None:
        """Its mask is ready."""
        self.parked.remove(sequence)
        sequence.parked = False
        insort(self._list_of(sequence), sequence, key=_by_rank)

    def _list_of(self, sequence: LiveSequence) -> list[LiveSequence]:
        if sequence.parked:
            return self.parked
        return self.prefilling if sequence.planned < sequence.known else self.decoding

    def publish(self, sequence: LiveSequence) -> None:
        """Let others find its full computed pages."""
        assert sequence.handle is not None
        first = len(sequence.handle.nodes)
        self._publish(sequence)
        if self._ledger is None:
            return
        for node, page in zip(sequence.handle.nodes[first:], sequence.pages[first:], strict=False):
            if node.page == page:
                self.written(node)
            else:  # another sequence published these tokens first
                self._ledger.clear(page)

    def written(self, node: PageNode) -> None:
        """The page has its content, in a step that is committed, unless it has left the cache meanwhile."""
        if self._ledger is not None and (node.handles or self._only.cache.is_evictable(node)):
            self._ledger.note(node.page, node.parent, node.chunk, 0, self._page_size)

    def _publish(self, sequence: LiveSequence) -> None:
        handle, region, size = sequence.handle, sequence.region, self._page_size
        assert handle is not None
        assert region is not None
        while sequence.computed >= sequence.publish_at:
            end = sequence.publish_at
            chunk = sequence.cache_key(tuple(sequence.tokens[end - size : end]), end - size)
            region.cache.publish(handle, chunk, sequence.pages[len(handle.nodes)])
            sequence.publish_at = end + size

    def clear_changes(self) -> tuple[tuple[PageNode, ...], tuple[PageNode, ...]]:
        """The plan has been made: clear what it contains, and unpin the pages that it copies. Returns the
        pages that it fills, then the pages that it copies."""
        fetched, sources = tuple(self._fetched), tuple(self._sources)
        self._fetched.clear()
        self.releases.clear()
        self.reclaimed.clear()
        self.copies.clear()
        self.moves.clear()
        for node in self._sources:
            self._region_of(node).cache.unpin(node)
        self._sources.clear()
        return fetched, sources

    def check_integrity(self) -> None:
        """Raises AssertionError, which names the slot, page or sequence that is inconsistent."""
        for table in (self.decoding, self.prefilling, self.parked):
            ranks = [sequence.rank for sequence in table]
            assert ranks == sorted(set(ranks)), f"not in order: {ranks}"
        assert self.background == sum(s.background for s in self), (
            "the count of background sequences is wrong"
        )
        slots = Counter([*self._free_slots, *(s.slot for s in self)])
        for slot, owners in slots.items():
            assert owners == 1, f"slot {slot} is owned {owners} times"
        for s in self:
            assert s.place is SequenceState.RUNNING, f"sequence {s.id} has a slot and is {s.place.name}"
            assert s.handle is not None, f"sequence {s.id} runs without a cache handle"
            assert s.capacity == len(s.pages) * self._page_size, f"sequence {s.id}: capacity {s.capacity}"
            assert s.computed <= s.planned <= min(s.last, s.capacity), (
                f"sequence {s.id}: {s.computed} computed, {s.planned} planned, "
                f"ends before {s.last}, pages for {s.capacity}"
            )
            assert s in self._list_of(s), f"sequence {s.id} is in the wrong list"
            assert not s.parked or s.planned == s.computed, f"sequence {s.id} is parked and planned"
            assert len(set(s.pages)) == len(s.pages), f"sequence {s.id} has a page twice: {s.pages}"
            published = [token for node in s.handle.nodes for token in node.chunk]
            assert len(published) <= s.computed, f"sequence {s.id} has published tokens that are not computed"
            assert published == list(s.cache_key(tuple(s.tokens[: len(published)]), 0)), (
                f"sequence {s.id} holds pages of other tokens"
            )
        for number, region in enumerate(self._regions):
            here = [s for s in self if s.region is region]
            assert region.sequences == len(here), f"region {number} has {len(here)} sequences"
            handles = [s.handle for s in here if s.handle is not None]
            held = [page for s in here for page in s.pages]
            for handle in self.holds.values():
                handles.append(handle)
                held += (node.page for node in handle.nodes)
            cache, size = region.cache, self._region_pages
            for page, holders in Counter(held).items():
                assert page // size == number, f"page {page} is not in region {number}"
                assert holders == 1 or cache.holds(page), f"private page {page} has {holders} holders"
            assert self.lent.isdisjoint(held), f"pages {self.lent.intersection(held)} are lent and held"
            cache.check_integrity(handles, held, self.lent)
        if self._ledger is not None:
            self._check_ledger(self._ledger)

    def _check_ledger(self, ledger: PageLedger) -> None:
        """Each entry says what the page holds."""
        holds = {node.page: node.chunk for node in self._only.cache.nodes()}
        for s in self:
            assert s.handle is not None
            for number, page in enumerate(s.pages[len(s.handle.nodes) :], len(s.handle.nodes)):
                begin = number * self._page_size
                holds[page] = tuple(s.tokens[begin : min(s.computed, begin + self._page_size)])
        for page in ledger.held():
            said = ledger.chunk(page)
            assert said == holds.get(page), f"page {page} holds {holds.get(page)}, its entry says {said}"


def _fetched_behind(staged: StagedPages | None, nodes: int) -> int:
    """How many of the staged pages follow a sequence's first `nodes` pages without a gap."""
    if staged is None or staged.first > nodes:
        return 0
    return max(staged.end - nodes, 0)
