"""Adapters in device memory, paged by true rank: an adapter of rank 8 takes an eighth of one of rank 64.

Each module (q, k, v, ...) has a page table for all layers. Per module, an adapter occupies the pages for its
largest rank over the layers. If a layer has fewer ranks, the rest of its rows are zero.
`lora/weight_pools.py` decides where pages lie and what memory they take.

Adapters are identified by digest. A pinned adapter stays. Of the others, the least recently used are evicted
if room is needed. The pool is synchronous and has one owner. Its copies to a device run in parallel with the
steps (`lora/copies.py`), layer by layer, so a step with a cold adapter begins before the last layer is there.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch

from personae.errors import AdapterError, Overloaded
from personae.kernels.decoder import MODULES, LoraStack
from personae.kernels.memory import Memory, memory_of
from personae.kernels.sgmv import RANK_PAGE, RankTable, WeightPool
from personae.kernels.sgmv_calls import sgmv_calls
from personae.kernels.upload import upload
from personae.lora.adapter import Adapter
from personae.lora.base import BaseWeights
from personae.lora.copies import Copies, CopyEvent
from personae.lora.fit import bounds_of_pool, check_fit, too_large
from personae.lora.non_lora_deltas import NonLoraDeltas
from personae.lora.resident import Resident
from personae.lora.shapes import LoraShapes
from personae.lora.stacking import stacking
from personae.lora.stored import PageReader, Pieces, finished
from personae.lora.weight_pools import RankPages, RankPools, pages_by_module, pool_bytes
from personae.lora.writing import sending


class LoraPool:
    """The weight pools and page tables of all modules, and the adapters in them.

    `stacks`: by module, the weight pools of all layers as one tensor. `weight_pools`: by group of modules
    that adapters may change, for each layer, those of its modules, in their order. `tables`: by group, their
    rank tables, the same in every layer.

    capacity_rows: rank rows per module, a multiple of RANK_PAGE. max_adapters: slots. The memory is
    `pool_bytes(shapes, capacity_rows, dtype)`, in whole granules if `memory` has them, and up to as much
    again for the adapters' non-LoRA deltas, allocated on demand. spare_rows: this many more rows have an
    address but no memory. Memory can be lent to the pool (`budget`, in bytes) and recalled (`evict`); it may
    be mapped behind any module's rows. `memory`: the device's. `base`: for adapters that depend on the base's
    weights. A load may return before its `copies` are done: users of the adapter wait for `arriving`.
    """

    def __init__(
        self,
        shapes: LoraShapes,
        *,
        capacity_rows: int,
        max_adapters: int,
        dtype: torch.dtype,
        device: torch.device,
        base: BaseWeights | None = None,
        spare_rows: int = 0,
        copies: Copies | None = None,
        memory: Memory | None = None,
    ) -> None:
        if capacity_rows < RANK_PAGE or capacity_rows % RANK_PAGE or max_adapters < 1:
            raise ValueError("capacity_rows must be a positive multiple of RANK_PAGE, max_adapters positive")
        memory = memory_of(device, 0) if memory is None else memory
        # Experts' pages only have addresses of their own: their memory is what others leave.
        shapes = shapes if memory.lends else shapes.without_experts()
        self.shapes, self.dtype, self.device = shapes, dtype, device
        self.num_pages = (capacity_rows + spare_rows) // RANK_PAGE
        self._counts = pages_by_module(shapes, capacity_rows + spare_rows, dtype)
        self.bounds = bounds_of_pool(shapes, capacity_rows, dtype)
        self.max_adapters = max_adapters
        most_pages = self.bounds.max_rank // RANK_PAGE  # per module of an adapter
        self._halves = RankPools(memory, shapes, self._counts, dtype)
        self._tables = {  # with a row for each expert of a slot
            module: RankTable(
                torch.zeros(max_adapters * site.experts, dtype=torch.int32, device=device),
                torch.zeros(max_adapters * site.experts, most_pages, dtype=torch.int32, device=device),
            )
            for module, site in shapes.sites.items()
        }
        self._no_others = shapes.sites.keys() <= set(MODULES)
        self.experts = max((site.experts for site in shapes.sites.values()), default=1)
        self.stacks = {
            module: LoraStack(a.layers(), b.layers(), self._tables[module])
            for module, (a, b) in self._halves.items()
        }
        self.weight_pools = {
            group: [
                tuple(WeightPool(self.stacks[m].a[layer], self.stacks[m].b[layer]) for m in modules)
                for layer in range(shapes.layers)
            ]
            for group, modules in shapes.groups.items()
        }
        self.tables = {
            group: tuple(self._tables[module] for module in modules)
            for group, modules in shapes.groups.items()
        }
        self._pages = RankPages(self._halves, self._counts)
        self._free_slots = list(reversed(range(max_adapters)))
        self._residents: dict[str, Resident] = {}  # by digest, the least recently used first
        self.deltas = NonLoraDeltas(shapes, base, dtype, device)
        self.budget = pool_bytes(shapes, capacity_rows, dtype, memory.granule)
        self._borrows = spare_rows > 0
        self._copies = Copies() if copies is None else copies
        self._filler = PageReader({module: (a.data, b.data) for module, (a, b) in self._halves.items()})
        self._arriving: dict[int, list[CopyEvent]] = {}  # by slot, one event per layer
        self.begin_sgmv = sgmv_calls(device, dtype)
        self.loads = self.evictions = 0

    @property
    def residents(self) -> tuple[str, ...]:
        """The digests of the adapters in the pool, the least recently used first."""
        return tuple(self._residents)

    def slot(self, digest: str) -> int | None:
        """The slot of an adapter, None if it is not in the pool."""
        resident = self._residents.get(digest)
        return None if resident is None else resident.slot

    def arriving(self, slots: Collection[int]) -> tuple[Sequence[CopyEvent], ...]:
        """For each adapter in these slots that is still being copied, the events of its layers."""
        self._arriving = {slot: marks for slot, marks in self._arriving.items() if not marks[-1].reached}
        return tuple(marks for slot, marks in self._arriving.items() if slot in slots)

    def pin(self, digest: str) -> int:
        """Hold an adapter in the pool until as many calls of `unpin`. Returns its slot."""
        resident = self._touch(digest)
        resident.pins += 1
        return resident.slot

    def unpin(self, digest: str) -> None:
        """Undo one `pin`. It counts as use."""
        resident = self._touch(digest)
        if not resident.pins:
            raise ValueError(f"adapter {digest} is not pinned")
        resident.pins -= 1

    def pins(self, digest: str) -> int:
        """How often the adapter is pinned; 0 if it is not in the pool."""
        resident = self._residents.get(digest)
        return 0 if resident is None else resident.pins

    def has_experts(self, slots: Collection[int]) -> bool:
        """Whether an adapter in these slots changes experts."""
        own = [resident for resident in self._residents.values() if resident.slot in slots]
        return any(self.shapes.sites[module].experts > 1 for resident in own for module in resident.pages)

    def needing_layers(self, slots: Collection[int]) -> set[int]:
        """Those of these slots whose adapters a forward pass in one call cannot apply: they have non-LoRA
        deltas, or change other modules than it does."""
        if self._no_others and not self.deltas:
            return set()
        own = [resident for resident in self._residents.values() if resident.slot in slots]
        return {
            resident.slot
            for resident in own
            if resident.slot in self.deltas or not set(resident.pages).issubset(MODULES)
        }

    def short_of(self, adapter: Adapter) -> int:
        """The bytes that an adapter needs so that nothing is evicted; 0 if it is in the pool, or if nothing
        can be lent."""
        if not self._borrows or adapter.digest in self._residents:
            return 0
        return max(self._pages.cost(_pages(adapter)) - self.room, 0)

    @property
    def room(self) -> int:
        """The bytes of the budget that no adapter uses."""
        return self.budget - self._pages.used

    def evict(self, size: int) -> int:
        """Evict unpinned adapters, the least recently used first, until `size` bytes are free. Returns how
        many of them are free. `unmapping` then frees their memory."""
        for digest in list(self._residents):
            if self.room >= size:
                break
            if not self._residents[digest].pins:
                self.unload(digest)
                self.evictions += 1
        return min(self.room, size)

    def unmapping(self) -> Iterator[None]:
        """Free the memory that no adapter uses, piece by piece, once the device has finished its earlier
        work."""
        yield from self._halves.unmapping(self._copies)

    def check_fits(self, adapter: Adapter) -> None:
        """Raises AdapterError if the adapter does not fit even into an empty pool."""
        try:
            check_fit(adapter, self.bounds)
            if adapter.experts and RankPages(self._halves, self._counts).cost(_pages(adapter)) > self.budget:
                raise too_large(adapter, self.bounds)
        except AdapterError as error:
            raise AdapterError(f"adapter {adapter.name!r}: {error.message}") from None

    def load(self, adapter: Adapter) -> int:
        """Load an adapter, if it is not in the pool, and mark it as used. Returns its slot, which it keeps
        until it is unloaded.

        Raises AdapterError if it can never fit, and Overloaded if pinned adapters leave no room. In both
        cases nothing has changed.
        """
        if (filled := finished(self.loading(adapter))) is not None:
            try:
                filled.result()
            except AdapterError:
                self.unload(adapter.digest)
                raise
        return self._touch(adapter.digest).slot

    def loading(self, adapter: Adapter) -> Pieces:
        """As `load`, but in pieces, so that the caller can do other work between them. They are short: the
        system may have to clear memory first, 2 MB at a time.

        The first piece raises what `load` raises. The iterator must be run to its end before the adapter is
        used; until then the adapter is pinned. A stored adapter is still being read into its pages after
        that: the caller keeps it pinned until the returned future is done, and unloads it if it failed.
        """
        if adapter.digest in self._residents:
            return None
        self.check_fits(adapter)
        victims = self._evictions_for(adapter)
        if victims is None:
            raise Overloaded(f"adapter {adapter.name!r}: all adapters in memory are in use")
        for digest in victims:
            self.unload(digest)
        self.evictions += len(victims)
        self.loads += 1
        slot = self._free_slots.pop()
        pages = {module: self._pages.take(module, count) for module, count in _pages(adapter).items()}
        for module, own in pages.items():
            first = self._halves[module][0]
            experts = self.shapes.sites[module].experts
            ids = np.array([first.place(page) for page in own], np.int32).reshape(experts, -1)
            rows = slice(slot * experts, (slot + 1) * experts)
            self._tables[module].pages[rows, : ids.shape[1]] = upload(ids, self.device)
            self._set_rank(module, slot, adapter.ranks[module])
        resident = self._residents[adapter.digest] = Resident(
            slot, pages, adapter.ranks, adapter.extra_bytes(self.shapes), pins=1
        )
        marks: list[CopyEvent] = []
        try:
            # Ranks exchange something here. What follows takes some of them more pieces than others.
            yield from self.deltas.place(slot, adapter)
            yield from self._halves.mapping(pages, self._copies, self.room)
            if adapter.stored is not None:
                resident.pins -= 1
                return self._filler.begin(adapter.stored, pages, adapter.ranks)
            self._copies.begin()
            if adapter.stacks:
                for module, own in pages.items():
                    for half, stack in zip(self._halves[module], adapter.stacks[module], strict=True):
                        yield from stacking(half.data, own, stack)
            else:
                yield from self._by_layer(adapter, slot, pages, marks)
        except AdapterError:
            resident.pins = 0
            self.unload(adapter.digest)
            raise
        if marks:
            self._arriving[slot] = marks
        resident.pins -= 1
        return None

    def unload(self, digest: str) -> None:
        """Free an adapter's slot and pages. Raises KeyError if it is not in the pool, ValueError if it is
        pinned."""
        resident = self._residents[digest]
        if resident.pins:
            raise ValueError(f"adapter {digest} is pinned")
        del self._residents[digest]
        self._free_slots.append(resident.slot)
        self.deltas.drop(resident.slot)
        self._arriving.pop(resident.slot, None)
        for module, pages in resident.pages.items():
            for half, chunks in zip(self._halves[module], self._pages.put(module, pages), strict=True):
                half.left(chunks)
            self._set_rank(module, resident.slot, 0)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot and page is used once and the device's tables agree."""
        taken = [resident.slot for resident in self._residents.values()]
        assert sorted(taken + self._free_slots) == list(range(self.max_adapters)), "slots"
        for module, table in self._tables.items():
            pages = [page for r in self._residents.values() for page in r.pages.get(module, ())]
            assert sorted(pages + self._pages.free[module]) == list(range(self._counts[module])), (
                f"pages of {module}"
            )
            experts = self.shapes.sites[module].experts
            ranks = [0] * (self.max_adapters * experts)
            for resident in self._residents.values():
                own, rank = resident.pages.get(module, ()), resident.ranks.get(module, 0)
                rows = slice(resident.slot * experts, (resident.slot + 1) * experts)
                ranks[rows] = [rank // experts] * experts
                assert len(own) == -(-rank // RANK_PAGE), f"number of pages of {module}"
                ids = [self._halves[module][0].place(page) for page in own]
                width = len(own) // experts
                assert table.pages[rows, :width].flatten().tolist() == ids, f"page table of {module}"
            assert table.rank.tolist() == ranks, f"ranks of {module}"
        self._pages.check_integrity([resident.pages for resident in self._residents.values()])
        assert self.room >= 0, f"{self._pages.used} bytes are used of {self.budget}"
        assert all(resident.pins >= 0 for resident in self._residents.values()), "pins"

    def _set_rank(self, module: str, slot: int, rank: int) -> None:
        # A slice, because assigning a number to one element is a copy for which the host waits.
        experts = self.shapes.sites[module].experts
        self._tables[module].rank[slot * experts : (slot + 1) * experts].fill_(rank // experts)

    def _touch(self, digest: str) -> Resident:
        resident = self._residents[digest] = self._residents.pop(digest)
        return resident

    def _evictions_for(self, adapter: Adapter) -> list[str] | None:
        """The adapters to evict so that the adapter fits, the least recently used first; None if that is not
        enough."""
        counts, free_pages = _pages(adapter), self._pages.copy()
        slots = 1 - len(self._free_slots)
        extra = adapter.extra_bytes(self.shapes) - self.bounds.max_extra
        extra += sum(resident.extra for resident in self._residents.values())
        missing, size = self._missing(free_pages, counts)
        victims = []
        for digest, resident in self._residents.items():
            if max(slots, extra, size, *missing.values()) <= 0:
                break
            helps = (
                slots > 0
                or (size > 0 and resident.pages)
                or (extra > 0 and resident.extra)
                or any(count > 0 and resident.pages.get(module) for module, count in missing.items())
            )
            if resident.pins or not helps:
                continue
            victims.append(digest)
            slots -= 1
            extra -= resident.extra
            for module, pages in resident.pages.items():
                free_pages.put(module, pages)
            missing, size = self._missing(free_pages, counts)
        return victims if max(slots, extra, size, *missing.values()) <= 0 else None

    def _missing(self, free_pages: RankPages, counts: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """The missing pages of each module, and the missing bytes."""
        pages = {module: count - len(free_pages.free[module]) for module, count in counts.items()}
        return pages, free_pages.cost(counts) - (self.budget - free_pages.used)

    def _by_layer(
        self, adapter: Adapter, slot: int, pages: Mapping[str, tuple[int, ...]], marks: list[CopyEvent]
    ) -> Iterator[None]:
        """Copy layer by layer, with an event after each layer that is still being copied."""
        modules = {**pages, **dict.fromkeys(module for _, module in adapter.dora_bias)}
        for layer in range(self.shapes.layers):
            for module in modules:
                yield from self._writing(adapter, layer, module, slot, pages.get(module, ()))
            if (mark := self._copies.mark()) is not None:
                marks.append(mark)

    def _writing(
        self, adapter: Adapter, layer: int, module: str, slot: int, pages: tuple[int, ...]
    ) -> Iterator[None]:
        """Copy one module of a layer to its pages, with the scaling folded into B. Rows past the rank are
        zeroed."""
        gain = self.deltas.gain(slot, adapter, layer, module, self._copies) if adapter.dora_bias else None
        if not pages:
            yield
            return
        pair = adapter.pairs.get((layer, module))
        a, b = (half.data[:, layer] for half in self._halves[module])
        yield from sending(self._copies, a, pages, pair, "a", None)
        yield from sending(self._copies, b, pages, pair, "b", gain)


def _pages(adapter: Adapter) -> dict[str, int]:
    """How many pages an adapter needs of each module."""
    return {module: -(-rank // RANK_PAGE) for module, rank in adapter.ranks.items()}
