"""The paged key/value cache. Page tables say which sequence has which page.

What a layer keeps of a token is its `KVSpec`. Layers with the same spec form a group with one tensor; each
group has a part for every page. Scheduling knows pages only.

By default the memory is ordered by layer, which a CPU reads faster. If memory is lent in granules, it is
ordered by page: a page's keys and values of all layers lie side by side. So one page, or a run of a few,
fills whole granules. Ordered by layer, idle neighbours would have to fill a granule in every layer.
"""

from collections.abc import Collection, Iterator, Sequence
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from personae.engine.layers.block import KVSpec
from personae.engine.plan import MemoryLayout
from personae.kernels.ahead import Ahead
from personae.kernels.attention import kv_width
from personae.kernels.file_memory import FileMemory
from personae.kernels.mappable import HUGE
from personae.kernels.memory import Memory, TorchMemory, memory_of, unmapping_pages
from personae.kernels.states import windows

if TYPE_CHECKING:
    from personae.engine.heads.states import HeadStates

AHEAD = 2048  # tokens whose pages have memory before they are used

Specs = Sequence[KVSpec | None]
"""The spec of each layer; None for a layer that keeps nothing."""


class _Kind(NamedTuple):
    """So many parts of this shape are kept of a page, by each of so many layers."""

    layers: int
    parts: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class KVCache:
    """`groups`: by spec, `[layers, parts, num_pages, heads, page_size, width]` of the layers that have it,
    in order (`kv_width`); index 1 is 0 for keys, 1 for values. `layers`: the keys and values of each layer.
    `states`: the states of each layer that has some, [num_pages, windows, ...] float32.

    The scheduler decides who owns which page; the cache only holds them, those of one region. With `spare`
    there is one more page, `spare_page`, which nobody owns: padding is written there. `memory`: the device's
    memory. `reader` gets the hidden states of every forward pass.
    """

    reader: "HeadStates | None" = None

    def __init__(
        self,
        specs: Specs,
        layout: MemoryLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        spare: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self.page_size = layout.page_size
        self._windows, _ = windows(layout.page_size)
        self.num_pages = layout.region_pages
        self.spare_page = self.num_pages if spare else None
        self.dtype = dtype
        self.device = device
        self.page_bytes = self.bytes_per_page(specs, layout.page_size, dtype)
        self._run = layout.run
        self._memory = memory_of(device, 0) if memory is None else memory
        pages, members = self.num_pages + spare, _members(specs)
        stateful = [spec for spec in members if spec.state]
        kinds = [
            _Kind(len(members[spec]), 1, (self._windows, *spec.state), torch.float32) for spec in stateful
        ]
        for spec, layers in members.items():
            kind = spec.dtype or dtype
            shape = spec.heads, spec.tokens(self.page_size), kv_width(spec.head_dim, kind)
            kinds.append(_Kind(len(layers), spec.parts, shape, kind))
        tensors = self._reserve(kinds, pages)
        groups, states = tensors[len(stateful) :], tensors[: len(stateful)]
        self._kept = (*groups, *states)
        self.file = memory if isinstance(memory, FileMemory) else None
        self._reached = 0  # pages of the file that are on huge pages of the system
        self._ahead: Ahead | None = None
        if device.type == "cpu" and isinstance(self._memory, TorchMemory) and self.page_bytes:
            self._ahead = Ahead([*self._tensors()], -(-AHEAD // self.page_size))
        self.groups = dict(zip(members, groups, strict=True))
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, Tensor] = {}
        for spec, layers in members.items():
            for layer, parts in zip(layers, self.groups[spec], strict=True):
                self.layers[layer] = parts[0], parts[-1]
        for spec, kept in zip(stateful, states, strict=True):
            self.states |= zip(members[spec], kept[:, 0], strict=True)

    def _reserve(self, kinds: Sequence[_Kind], pages: int) -> list[Tensor]:
        """What is kept of each kind: [layers, parts, pages, *shape]."""
        if not self._memory.granule:
            return [self._memory.reserve((*each[:2], pages, *each.shape), each.dtype) for each in kinds]
        self._pages = self._memory.reserve((pages, self.page_bytes), torch.uint8)
        self._memory.map(self._pages)
        widths = [each.layers * each.parts * prod(each.shape) * each.dtype.itemsize for each in kinds]
        return [
            part.view(each.dtype).view(pages, *each[:2], *each.shape).movedim(0, 2)
            for each, part in zip(kinds, torch.split(self._pages, widths, dim=1), strict=True)
        ]

    @property
    def data(self) -> Tensor:
        """The only group."""
        (data,) = self.groups.values()
        return data

    @property
    def grows(self) -> bool:
        """Whether memory comes as pages are used: then `reach` must be told."""
        return self._ahead is not None or self.file is not None

    def reach(self, page: int) -> None:
        """Pages up to this one are about to be used. The next ones get memory meanwhile. Of a cache in a
        file: their memory is had on huge pages, for as many pages at once as one holds of the largest
        part."""
        if self._ahead is not None:
            self._ahead.reach(page)
        if page < self._reached or self.file is None:
            return
        stride = max(HUGE // max(tensor[0].nbytes for tensor in self._tensors()), 1)
        end = min((page // stride + 1) * stride, self.num_pages)
        for tensor in self._tensors():
            self.file.enlarge(tensor[self._reached : end])
        self._reached = end

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, destination) in all layers, one pair after the other."""
        for kept in self._kept:
            for source, destination in pairs:
                kept[:, :, destination] = kept[:, :, source]
        if self.reader is not None:
            self.reader.copy_pages(pairs)

    @property
    def content_bytes(self) -> int:
        """The bytes of a page's content as `read_pages` returns it."""
        return self.page_bytes + (0 if self.reader is None else self.reader.pages[0].nbytes)

    def read_pages(self, pages: Sequence[int]) -> Tensor:
        """The content of these pages, [pages, content_bytes] uint8, in a form that does not depend on the
        order of the memory. What a reader keeps is part of it."""
        content = torch.empty(len(pages), self.content_bytes, dtype=torch.uint8, device=self.device)
        ids = torch.tensor(pages, device=self.device)
        for part, there in self._parts(content):
            part.copy_(there.index_select(0, ids).view(part.shape))
        return content

    def write_pages(self, pages: Sequence[int], content: Tensor) -> None:
        """Give these pages a content that `read_pages` returned."""
        content, ids = content.to(self.device), torch.tensor(pages, device=self.device)
        for part, there in self._parts(content):
            there.index_copy_(0, ids, part.reshape(len(pages), *there.shape[1:]))

    def _parts(self, content: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The parts [pages, bytes] of contents, each with what it is of: [pages, ...], as bytes."""
        at = 0
        for there in (*self._tensors(), *(() if self.reader is None else (self.reader.pages,))):
            end = at + there[0].nbytes
            yield content[:, at:end], there.view(torch.uint8)
            at = end

    def _tensors(self) -> Iterator[Tensor]:
        """All that is kept of pages, layer by layer: [pages, ...]."""
        for kept in self._kept:
            yield from kept.flatten(0, 1)

    def unmapping(self, pages: Collection[int]) -> Iterator[None]:
        """Unmap these pages, whole runs, piece by piece. Ordered by layer there may be thousands of pieces,
        because each page has a part in each layer."""
        if self._memory.granule:
            for run in self._runs(pages):
                self._memory.unmap(run)
                yield
            return
        self._reached = min((self._reached, *pages))
        if self._ahead is not None:
            self._ahead.unmap(pages)
        for tensor in self._tensors():
            yield from unmapping_pages(self._memory, tensor, pages)

    def mapping(self, pages: Collection[int]) -> Iterator[None]:
        """Map pages again after `unmapping`, run by run."""
        if self._memory.granule:
            for run in self._runs(pages):
                self._memory.map(run)
                yield
        if self._ahead is not None:
            self._ahead.map(pages)

    def _runs(self, pages: Collection[int]) -> Iterator[Tensor]:
        for run in sorted({page // self._run for page in pages}):
            yield self._pages[run * self._run : (run + 1) * self._run]

    @staticmethod
    def bytes_per_page(specs: Specs, page_size: int, dtype: torch.dtype) -> int:
        """The memory of one page over all layers: keys, values and states."""
        return sum(spec.page_bytes(dtype, page_size) for spec in specs if spec is not None)


def _members(specs: Specs) -> dict[KVSpec, list[int]]:
    """The layers of each group."""
    members: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec is not None:
            members.setdefault(spec, []).append(layer)
    return members


def pages_of_a_run(page_bytes: int, granule: int) -> int:
    """The fewest neighbouring pages that fill whole granules. A run begins at a multiple of that number."""
    return granule // gcd(granule, page_bytes) if granule else 1
